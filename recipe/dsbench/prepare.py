"""Convert DSBench's modelling tasks (published as JSON lines of {prompt, answer, metadata}) to parquet.

`python recipe/dsbench/prepare.py --input dsbench_modeling_train.json --test_input dsbench_modeling_eval.json
--cleaned dsbench_modeling_cleaned_prompts.json --data_root . --local_dir data/dsbench`

The tables are not part of the published files: metadata names train_file, test_file and answer_dir, relative to
--data_root. Tasks without them are reported and, without --allow_missing, end the script before anything is written.

Invariant: agents read the cleaned task text if there is one for the task's id, else the published text, which the coach
reads in either case (`extra_info.task`). The answers' file is never one of `extra_info.files`. Paths stay relative to
the data root.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import read_rows, row_of
from recipe.dsbench.metrics import DATA_TYPES, METRICS, metric_in_text, named_metric
from recipe.dsbench.score import mapping_of, truth_of

ANSWER_FILE = "test_answer.csv"
_SHOWN = 5
_FACTS = ("metric", "id_column", "target_column")
"""Entries of the cleaned prompts that the score uses."""


@dataclass(frozen=True, slots=True)
class Task:
    task_id: str
    text: str
    """For the agents."""
    problem: str
    """As published."""
    metadata: dict[str, Any]
    files: dict[str, Path]
    """Name in the workspace -> path below the data root."""
    answer: Path

    def missing(self, root: Path) -> list[Path]:
        """Return the tables that do not exist."""
        return [root / path for path in (*self.files.values(), self.answer) if not (root / path).is_file()]

    def table_mb(self, root: Path) -> int:
        """Return the size of the agents' tables in MiB, rounded up; those that do not exist count as empty."""
        paths = [root / path for path in self.files.values()]
        return -(-sum(path.stat().st_size for path in paths if path.is_file()) // (1 << 20))


def tasks_of(name: str, cleaned: Mapping[str, Mapping[str, Any]], root: Path) -> list[Task]:
    """Read the tasks of a file: a JSON list or JSON Lines. `root`: what its paths are relative to. Raises UserError."""
    tasks = []
    for number, row in enumerate(read_rows(name, "train"), 1):
        where = f"{name}: row {number}"
        prompt, metadata = row.get("prompt"), mapping_of(row.get("metadata"), f"{where}: metadata")
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"{where}: `prompt` must be the task's text")
        task_id = str(metadata.get("task_id") or "")
        lacking = [key for key in ("task_id", "train_file", "test_file") if not metadata.get(key)]
        if lacking:
            raise UserError(f"{where}: metadata lacks {', '.join(lacking)}")
        tasks.append(_task(task_id, prompt, row.get("answer"), metadata, cleaned.get(task_id), where, root))
    repeated = {task.task_id for task in tasks if sum(other.task_id == task.task_id for other in tasks) > 1}
    if repeated:
        raise UserError(f"{name}: task_id {min(repeated)} occurs twice; remove one of the rows")
    return tasks


def _task(
    task_id: str,
    prompt: str,
    answer: object,
    metadata: dict[str, Any],
    cleaned: Mapping[str, Any] | None,
    where: str,
    root: Path,
) -> Task:
    if metadata.get("answer_dir"):
        truth = Path(str(metadata["answer_dir"])) / ANSWER_FILE
    elif isinstance(answer, str) and answer.strip():
        truth = Path(answer)
    else:
        raise UserError(f"{where}: `answer` is null and metadata has no answer_dir; add one of them, a path")
    entry = dict(cleaned or {})
    text = str(entry.get("cleaned_prompt") or "").strip() or prompt
    # the published text decides the metric if the cleaned entry names none that is known
    facts = {key: entry[key] for key in _FACTS if entry.get(key) is not None}
    metric = named_metric(facts.get("metric")) or named_metric(metadata.get("metric")) or metric_in_text(prompt)
    facts |= {"metric": metric} if metric else {}
    files = {"train.csv": Path(str(metadata["train_file"])), "test.csv": Path(str(metadata["test_file"]))}
    if any(_same_file(root / truth, root / file) for file in files.values()):
        raise UserError(f"{where}: {truth} is both the answer and a file for the agents")
    return Task(task_id, text, prompt, metadata | facts, files, truth)


def _same_file(path: Path, other: Path) -> bool:
    """Return whether two paths, whose files need not exist, lead to one file by any spelling, symlink or hard link."""
    try:
        return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))
    except (OSError, RuntimeError, ValueError):  # a loop of symlinks; a name that no file can have
        return False


def read_cleaned(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Read the cleaned prompts: an object of task_id -> {cleaned_prompt, metric, ...}, or of task_id -> text. Raises
    UserError."""
    if path is None:
        return {}
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; pass the published cleaned prompts") from error
    if not isinstance(entries, dict):
        raise UserError(f"{path}: must be an object of task_id -> cleaned prompt")
    return {key: value if isinstance(value, dict) else {"cleaned_prompt": value} for key, value in entries.items()}


def row(task: Task, index: int, split: str, data_type: str) -> dict[str, Any]:
    """Return a task's row in verl's schema."""
    extra = {
        "files": {name: {"path": str(path)} for name, path in task.files.items()},
        "answer_file": str(task.answer),
        "metadata": json.dumps(task.metadata, sort_keys=True),
        "data_type": data_type,
        "task": task.problem,
    }
    return row_of("dsbench", task.text, "", index, split, **extra) | {"ability": "data_modeling"}


def data_types(tasks: Sequence[Task], root: Path, *, allow_missing: bool) -> dict[str, str]:
    """Return task_id -> classification or regression, by the answers as they will be scored; without them by the
    metric, else as declared. Prints one line about tasks without tables. Raises UserError for them unless
    `allow_missing`, and for answers that cannot be scored."""
    missing = [task for task in tasks if task.missing(root)]
    if missing:
        names = [task.task_id for task in missing]
        summary = f"{len(missing)} of {len(tasks)} tasks lack tables below {root}: {_first_of(names)}"
        if not allow_missing:
            example = missing[0].missing(root)[0]
            raise UserError(f"{summary}; first: {example}; pass their --data_root, or --allow_missing")
        print(f"warning: {summary}; an episode of such a task fails")
    return {task.task_id: _data_type(task, root) for task in tasks}


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def warn_of_large(tasks: Sequence[Task], root: Path, quota_mb: int) -> None:
    """Print one line that names the tasks whose tables do not fit into an episode's folder; a run ends at the first."""
    sizes = {task.task_id: task.table_mb(root) for task in tasks}
    large = sorted((task_id for task_id in sizes if sizes[task_id] >= quota_mb), key=lambda task_id: -sizes[task_id])
    if large:
        names = [f"{task_id} ({sizes[task_id]} MiB)" for task_id in large]
        print(
            f"warning: the tables of {len(large)} of {len(tasks)} tasks do not fit into a folder of {quota_mb} MiB: "
            f"{_first_of(names)}; a run ends at such a task: remove it, or set the env's quota_mb to at least twice "
            "its size"
        )


def _data_type(task: Task, root: Path) -> str:
    if (root / task.answer).is_file():
        return truth_of(root / task.answer, task.metadata, task.problem, where=task.task_id).data_type
    metric = named_metric(task.metadata.get("metric"))
    declared = METRICS[metric].data_type if metric else task.metadata.get("data_type")
    return str(declared) if declared in DATA_TYPES else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="the tasks: JSON Lines or a JSON list")
    parser.add_argument("--test_input", help="tasks to validate on; by default, --test_size of --input are held out")
    parser.add_argument(
        "--test_size", type=data_script.test_size, help="tasks to hold out, or 'all'; by default a quarter"
    )
    parser.add_argument("--cleaned", type=Path, help="cleaned prompts by task_id")
    parser.add_argument("--data_root", "--data-root", type=Path, default=Path(), help="what the paths are relative to")
    parser.add_argument("--allow_missing", "--allow-missing", action="store_true", help="write tasks without tables")
    parser.add_argument("--quota_mb", type=int, default=1024, help="MiB of the env's folder; larger tasks are reported")
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out tasks")
    options = parser.parse_args(argv)
    if options.test_input and options.test_size is not None:
        raise UserError("--test_size and --test_input cannot be combined; remove one of them")
    cleaned = read_cleaned(options.cleaned)
    tasks = tasks_of(options.input, cleaned, options.data_root)
    if options.test_input:
        test = tasks_of(options.test_input, cleaned, options.data_root)
    else:
        tasks, test = data_script.hold_out(tasks, options.test_size, options.seed)
    ids, texts = {task.task_id for task in test}, {data_script.text_key(task.problem) for task in test}
    train = [task for task in tasks if task.task_id not in ids and data_script.text_key(task.problem) not in texts]
    if len(train) < len(tasks):
        print(f"train: left out {counted(len(tasks) - len(train), 'task')} among the test tasks")
    types = data_types([*train, *test], options.data_root, allow_missing=options.allow_missing)
    warn_of_large([*train, *test], options.data_root, options.quota_mb)
    if cleaned:
        without = [task.task_id for task in (*train, *test) if task.task_id not in cleaned]
        print(f"cleaned prompts: {len(train) + len(test) - len(without)} tasks; the published text for {len(without)}")
    data_script.write(
        options.local_dir,
        {
            split: [row(task, index, split, types[task.task_id]) for index, task in enumerate(part)]
            for split, part in (("train", train), ("test", test))
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
