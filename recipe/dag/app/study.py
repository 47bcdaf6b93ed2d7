"""`verl-dag study`: arms x seeds at equal sampled tokens, each run a process of its own.

Invariant: a run is finished when its process has ended with code 0 for exactly its present settings; any other is
started again, and resumes by itself. Everything that is reported comes from the runs' folders.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.paths import resolve_path
from recipe.dag.core.problem import WorkflowError
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.episode.compute import elect
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.run_record import surroundings
from recipe.dag.report.secrets import command_without_secrets
from recipe.dag.report.study import Figures, Result, read_answers, read_result, write_report
from recipe.dag.reward.answer import extract_answer
from recipe.dag.workflow.machine import this_machine
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.source import read_source

MANY_STEPS = 1_000_000
"""Steps of a run that its tokens end."""
Seed = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Settings = dict[str, Any]


class Arm(Frozen):
    """What is compared: a training run, or a vote among answers of another arm's runs."""

    script: str | None = Field(default=None, pattern=r"\S")
    """A run script in Bash or Python and its arguments; the settings follow, and `SEED` is set."""
    workflow: str | None = None
    """A workflow file, in place of a script."""
    config: str | None = None
    """With `workflow`: FOLDER/NAME.yaml, the configuration."""
    algorithm: dict[str, Any] | None = None
    """Replaces the workflow's block `algorithm`."""
    settings: Settings = {}
    """Of this arm: settings of the run, and `workflow.<key>`; `{seed}` in a text is the seed, `~workflow.<key>: null`
    removes a key."""
    majority: int | None = Field(default=None, ge=2)
    """The arm is the most frequent of this many answers of the arm `of`, at its last validation."""
    of: str | None = None


class Study(Frozen):
    """A study file."""

    title: str
    tokens: int | None = Field(default=None, ge=1)
    """Sampled in training by each run: the step that reaches them is its last one. None: each run ends by its own
    configuration."""
    seeds: tuple[Seed, ...] = Field(min_length=1)
    metrics: tuple[str, ...] = Field(default=("episode/accuracy", "val/accuracy"), min_length=1)
    """A panel of the figure for each; the last is the table's. `*` matches any part of a name; matches are averaged."""
    settings: Settings = {}
    """Of all runs, before those of the arm."""
    arms: dict[Name, Arm] = Field(min_length=1)
    """The first is the one that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run of a study."""

    arm: str
    seed: int
    folder: Path
    program: list[str]
    settings: list[str]

    @property
    def arguments(self) -> list[str]:
        """What a finished run must have been started with; the Python is no part of it."""
        return [*self.program[1:], *self.settings]

    @property
    def finished(self) -> bool:
        file = self.folder / "finished.json"
        return file.is_file() and json.loads(file.read_bytes()) == self.arguments


def read_study(file: Path) -> Study:
    """Read a study file. Raises WorkflowError with every mistake and its position."""
    source = read_source(file)
    if source.has_refs:
        raise WorkflowError([source.problem((), "`!Ref` has no meaning in a study")])
    study, problems = parse_piece(Study, source.data, source, ())
    problems = [*source.problems, *problems]
    if study is None:
        raise WorkflowError(problems)
    if len(set(study.seeds)) < len(study.seeds):
        problems.append(source.problem(("seeds",), "a seed occurs twice; remove one"))
    for name, arm in study.arms.items():
        problems += [source.problem(("arms", name, *key), message) for *key, message in _mistakes(arm, study, file)]
    if problems:
        raise WorkflowError(problems)
    return study


def _mistakes(arm: Arm, study: Study, file: Path) -> Iterator[tuple[str, ...]]:
    """Yield an arm's mistakes, each a message after the key that has it, if one has."""
    trained = [name for name, other in study.arms.items() if other.of is None]
    unread = arm.model_fields_set - {"majority", "of"}
    if (arm.majority is None) != (arm.of is None):
        yield ("`majority` and `of` belong together, as in `{majority: 3, of: ARM}`",)
    elif arm.of is not None and arm.of not in trained:
        yield "of", f"no arm `{arm.of}` that is trained{did_you_mean(arm.of, trained)}"
    elif arm.of is not None and unread:
        yield min(unread), f"a vote is not trained; set this in `{arm.of}`"
    elif arm.of is None and (arm.script is None) == (arm.workflow is None):
        yield ("an arm has either `script`, or `workflow`, or `majority` and `of`",)
    elif arm.config is not None and arm.workflow is None:
        yield "config", "has no effect beside `script`; remove it"
    for key in ("script", "workflow", "config"):
        if value := getattr(arm, key):
            try:
                resolve_path(shlex.split(value)[0] if key == "script" else value, file)
            except (UserError, ValueError) as error:
                yield key, str(error)


def plans(study: Study, file: Path, output: Path) -> list[Plan]:
    """Return the runs, the seeds of an arm after each other."""
    trained = [(name, arm, seed) for name, arm in study.arms.items() if arm.of is None for seed in study.seeds]
    folders = [output / name / f"seed{seed}" for name, _, seed in trained]
    return [
        Plan(name, seed, folder, *_command(study, arm, seed, file, folder))
        for (name, arm, seed), folder in zip(trained, folders, strict=True)
    ]


def _command(study: Study, arm: Arm, seed: int, file: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return the program with its arguments, and the settings after them."""
    settings = [f"seed={seed}", f"output_dir={folder}", f"trainer.experiment_name={folder.parent.name}_{folder.name}"]
    if study.tokens is not None:
        settings += [f"trainer.total_training_steps={MANY_STEPS}", f"trainer.total_training_tokens={study.tokens}"]
    algorithm = {} if arm.algorithm is None else {"workflow.algorithm": arm.algorithm}
    for key, value in (study.settings | algorithm | arm.settings).items():
        text = value.replace("{seed}", str(seed)) if isinstance(value, str) else json.dumps(value)
        settings.append(key if key.startswith("~") else f"{key}={text}")
    if arm.script is not None:
        name, *arguments = shlex.split(arm.script)
        program = [sys.executable if name.endswith(".py") else "bash", str(resolve_path(name, file))]
        return [*program, *arguments], settings
    program = [sys.executable, "-m", "recipe.dag.main"]
    if arm.config is not None:
        config = resolve_path(arm.config, file)
        program += ["--config-path", str(config.parent), "--config-name", config.stem]
    return program, [f"workflow={resolve_path(arm.workflow or '', file)}", *settings]


class Runner:
    """Runs plans, `jobs` at once. Runs of one script and seed share their data and model, and do not run at once."""

    def __init__(self, jobs: int):
        self.jobs, self.signal = jobs, 0
        self.processes: set[subprocess.Popen] = set()
        self.shared: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)

    def run(self, wanted: Sequence[Plan]) -> None:
        """Run what is not finished. Raises UserError if a run fails, after the others, and SystemExit after a
        signal, which ends the runs, too."""
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ThreadPoolExecutor(self.jobs) as pool:
                failures = [line for line in pool.map(self._run, wanted) if line]
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.signal:
            print("interrupted; the same command goes on where it was", file=sys.stderr)
            raise SystemExit(128 + self.signal)
        if failures:
            raise UserError(f"{len(failures)} of {len(wanted)} runs failed. {failures[0]}")

    def _stop(self, number: int, frame: object) -> None:
        self.signal = number
        for process in list(self.processes):
            process.terminate()  # a run saves a checkpoint; Bash would await its program after SIGINT

    def _run(self, plan: Plan) -> str:
        """Run a plan with its output in `study.log`; return why it failed, with the end of the log, or ""."""
        if plan.finished:
            return ""
        shared = plan.folder if "recipe.dag.main" in plan.program else (*plan.program, plan.seed)
        with self.shared[shared]:
            if self.signal:
                return ""
            plan.folder.mkdir(parents=True, exist_ok=True)
            log = plan.folder / "study.log"
            print(f"{plan.arm}, seed {plan.seed}: running, {log}", flush=True)
            with log.open("a") as file:
                process = subprocess.Popen(
                    [*plan.program, *plan.settings],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "SEED": str(plan.seed)},
                    start_new_session=True,  # Ctrl-C reaches the run once, by `_stop`
                )
                self.processes.add(process)
                code = process.wait()
                self.processes.discard(process)
            if self.signal:  # a script that is ended leaves the program that it awaits
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if code == 0 and not self.signal:
            replace_file(plan.folder / "finished.json", [to_json(plan.arguments, indent=1), b"\n"])
            print(f"{plan.arm}, seed {plan.seed}: finished", flush=True)
            return ""
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        return f"{plan.arm}, seed {plan.seed}: ended with {code}; the end of {log}:\n{tail}"


def run_study(file: Path, output: Path, *, jobs: int = 1, only_report: bool = False) -> Figures:
    """Run what is missing, write table.md, table.tex, figure.png and manifest.json into `output`, and return the
    figures. Raises UserError."""
    study, output = read_study(file), output.absolute()
    wanted = plans(study, file, output)
    if not only_report:
        Runner(jobs).run(wanted)
    if missing := [plan for plan in wanted if not plan.finished]:
        raise UserError(f"{missing[0].folder}: this run and {len(missing) - 1} more are not finished; run them first")
    figures = figures_of(study, wanted)
    write_report(figures, output)
    replace_file(output / "manifest.json", [to_json(manifest(study, file, wanted, figures), indent=1), b"\n"])
    return figures


def figures_of(study: Study, wanted: Sequence[Plan]) -> Figures:
    """Read the results of finished runs. Raises UserError."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for plan in wanted:
        folders[plan.arm].append(plan.folder)
    results = {name: [read_result(folder, study.metrics) for folder in own] for name, own in folders.items()}
    for name, arm in study.arms.items():
        if arm.of is not None and arm.majority is not None:
            results[name] = [
                voted(result, folder, arm.majority)
                for result, folder in zip(results[arm.of], folders[arm.of], strict=True)
            ]
    for plan in wanted:
        result = results[plan.arm][study.seeds.index(plan.seed)]
        if study.tokens is not None and result.tokens < study.tokens:
            raise UserError(f"{plan.folder}: ended after {result.tokens:,} of {study.tokens:,} sampled tokens")
    return Figures(study.title, study.metrics, study.seeds, {name: results[name] for name in study.arms})


def voted(result: Result, folder: Path, k: int) -> Result:
    """Return a run's result if each answer is the most frequent of `k`, the earliest after a tie. Raises UserError."""
    scores, is_boxed = {}, False
    for problem, episodes in read_answers(folder).items():
        if len(episodes) < k:
            continue  # an episode failed, or validation.n is smaller
        answers = [extract_answer(episode["trajectory"][-1]["agent_output"]) for episode in episodes[:k]]
        is_boxed = is_boxed or any(answer is not None for answer in answers)
        winner = elect(answers, "answer", "first").parsed["answer"]
        solved = winner is not None and episodes[answers.index(winner)]["metrics"]["is_correct"]
        scores[problem] = float(solved)
    if not scores:
        raise UserError(f"{folder}: a vote of {k} needs as many answers; set `settings: {{validation.n: {k}}}`")
    if not is_boxed:
        raise UserError(f"{folder}: no answer is in \\boxed{{}}, which a vote reads; remove the arm")
    tokens = None if result.answer_tokens is None else k * result.answer_tokens
    return replace(result, scores=scores, curves={}, answer_tokens=tokens, hours=0.0)


def manifest(study: Study, file: Path, wanted: Sequence[Plan], figures: Figures) -> Mapping[str, Any]:
    """Return what identifies a study: file, commit, versions, machine, and the command and folder of each run."""
    machine = this_machine()
    return {
        "study": study.model_dump(exclude_defaults=True),
        "file": str(file),
        **surroundings(),
        "hardware": {"cpus": os.cpu_count(), "gpu_bytes": machine.gpu_bytes, "host_bytes": machine.host_bytes},
        "runs": [
            {
                "arm": plan.arm,
                "seed": plan.seed,
                "folder": str(plan.folder),
                "command": command_without_secrets([*plan.program, *plan.settings]),
                "tokens": (result := figures.results[plan.arm][study.seeds.index(plan.seed)]).tokens,
                "hours": result.hours,
                "gpus": result.gpus,
            }
            for plan in wanted
        ],
    }
