"""A careless teacher for engineer, modeler and analyst.

Invariant: the programs are those of `kit.py`, the prompts are built by the workflow's agents from what the workspace
answers (`envs/workspace_env.py`), and each agent is mistaken about a quarter or half of the tasks, always in the same
way and in most lessons, and elsewhere slips rarely. No lower temperature corrects that:
reinforcement learning has to find the choice that is right in a minority of the samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from recipe.dag.core.errors import UserError
from recipe.dag.tools.sandbox import matches
from recipe.dag.tools.sandbox_client import RunResult, SandboxClient, SessionFiles
from recipe.dag.types.context import Message
from recipe.dag.workflow.schema import Workflow
from recipe.dsbench import kit
from recipe.dsbench.tabular import DOMAINS, METRICS, Task, row, splits
from recipe.tiny.careless import RIGHT_READING
from recipe.tiny.dialogue import Demonstration, Dialogue, Script

SLIP, BROKEN = 0.06, 0.04
"""Rates at which an agent that is not mistaken about a task chooses something else, and at which it omits a bracket."""
DISTRACTED = tuple(domain.thing for domain in DOMAINS[1::2])
"""The engineer takes the two columns that do not matter in these domains' tables for the first two that do. The modeler
takes a peaked target for a weighted sum, and the analyst writes labels where probabilities are asked for."""

AGENTS = ("engineer", "modeler", "analyst")
FORM_OF = {"rmse": "value", "mae": "value", "accuracy": "label", "roc_auc": "probability"}
FILES = {"kit.py": Path(kit.__file__).read_text("utf-8")}
PROGRAM = "/tmp/tmp_sandbox/tmp_program.py"
"""The path of programs in the sandbox, which error messages quote."""


class Teacher:
    """Demonstrates a workflow whose nodes engineer, modeler and analyst share a folder, with up to two actions each.
    Raises UserError for others."""

    def __init__(self, workflow: Workflow, seed: int):
        nodes = {node.id: node for node in workflow.rollout_nodes}
        env = {nodes[name].env for name in AGENTS} if set(AGENTS) <= nodes.keys() else set()
        if len(env) != 1 or len(names := next(iter(env))) != 1 or names[0] not in workflow.envs:
            needed = f"the rollout nodes {', '.join(AGENTS)}, which share an env of the workflow"
            raise UserError(f"{workflow.path}: this teacher needs {needed}")
        self._names, self._dialogue = list(nodes), Dialogue(workflow, cast(SandboxClient, Folder()))
        self._seed, self._rng = seed, random.Random(seed)
        self.segments = _segments()

    def problems(self, count: int, test_size: int) -> list[Task]:
        return splits(self._seed, count, test_size)[0]

    def teach(self, problem: Task) -> list[Demonstration]:
        """Return one demonstration per action."""
        sample = row(problem, 0, "train", FILES)
        sample["extra_info"].pop("answer_csv")
        programs = [self._programs(name, problem) if name in AGENTS else None for name in self._names]
        return asyncio.run(self._dialogue.demonstrate(problem, Script(programs), sample=sample))

    def _programs(self, agent: str, task: Task) -> list[Callable[[list[Message]], str]]:
        """Return what writes the two programs of an agent: the second is careful about the form, as the first one
        failed."""
        return [partial(self._program, agent, task, broken) for broken in (BROKEN, 0.0)]

    def _program(self, agent: str, task: Task, broken: float, _prompt: list[Message]) -> str:
        write = {"engineer": self._columns, "modeler": self._model, "analyst": self._form}[agent]
        line = write(task)
        program = line[:-1] if self._rng.random() < broken else line
        return f"```python\nfrom kit import {line.partition('(')[0]}\n{program}\n```"

    def _columns(self, task: Task) -> str:
        relevant = [column.name for column in task.domain.relevant]
        others = [column.name for column in task.columns if column.name not in relevant]
        if task.domain.thing in DISTRACTED and self._mistaken():
            chosen = {*others, *relevant[2:]}
        else:
            chosen = {others[0] if self._rng.random() < SLIP else name for name in relevant}
        names = [f'"{column.name}"' for column in task.columns if column.name in chosen]  # in the order of the text
        return f"prepare({', '.join(names)})"

    def _model(self, task: Task) -> str:
        right = "bowl" if task.domain.peaked and not self._mistaken() else "linear"
        return f'train("{self._slipped(right, kit.MODELS)}")'

    def _form(self, task: Task) -> str:
        form = "label" if task.metric == "roc_auc" and self._mistaken() else FORM_OF[task.metric]
        return f'submit("{task.domain.thing}", "{task.domain.target}", "{self._slipped(form, kit.FORMS)}")'

    def _mistaken(self) -> bool:
        return self._rng.random() >= RIGHT_READING

    def _slipped(self, choice: str, among: tuple[str, ...]) -> str:
        if self._rng.random() >= SLIP:
            return choice
        return self._rng.choice([name for name in among if name != choice])


def _segments() -> list[str]:
    """Return the texts that are one token each: what all programs begin with, metrics, and names, which are then the
    same tokens in a task's text and in a program."""
    columns = [c.name for domain in DOMAINS for c in (*domain.relevant, *domain.irrelevant)]
    names = [name for domain in DOMAINS for name in (domain.thing, domain.target)]
    heads = [f"```python\nfrom kit import {name}\n{name}(" for name in ("prepare", "train", "submit")]
    return [*heads, *METRICS.values(), *dict.fromkeys([*columns, *names, *kit.MODELS, *kit.FORMS])]


class Folder:
    """Stands for the sandbox while a teacher demonstrates: a temporary folder per session, in which this file's
    programs run, in this process. Not for programs of a model."""

    async def open_session(self, quota_mb: int = 256, ttl_s: float = 300.0) -> str:
        self._temporary = tempfile.TemporaryDirectory()
        self._path = Path(self._temporary.name)
        return "folder"

    async def put(self, session_id: str, name: str, data: bytes) -> None:
        (self._path / name).write_bytes(data)

    async def list(self, session_id: str, *patterns: str) -> SessionFiles:
        paths = sorted(path for path in self._path.iterdir() if path.is_file())
        paths = [path for path in paths if not patterns or any(matches(path.name, pattern) for pattern in patterns)]
        sizes = {path.name: path.stat().st_size for path in paths}
        return SessionFiles(sizes, {path.name: path.stat().st_mtime for path in paths}, sum(sizes.values()), 1 << 30)

    async def settle(self, session_id: str) -> Sequence[str]:
        return ()

    async def get(self, session_id: str, name: str, max_bytes: int = 0) -> bytes:
        return (self._path / name).read_bytes()

    async def delete(self, session_id: str, name: str | None = None) -> None:
        self._temporary.cleanup()

    async def run_code(self, code: str, **limits: Any) -> RunResult:
        stdout, here = io.StringIO(), os.getcwd()
        sys.modules["kit"] = kit
        os.chdir(self._path)
        try:
            with contextlib.redirect_stdout(stdout):
                exec(compile(code, PROGRAM, "exec"), {"__name__": "__main__"})
        except SyntaxError as error:
            return RunResult("failed", "", "".join(traceback.format_exception_only(error)), 1, 0.0, 1)
        except SystemExit as error:
            return RunResult("failed", stdout.getvalue(), f"{error}\n", 1, 0.0, 1)
        finally:
            os.chdir(here)
            del sys.modules["kit"]
        return RunResult("success", stdout.getvalue(), "", 0, 0.0, 1)
