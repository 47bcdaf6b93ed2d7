"""Contracts about the files that agents have to make.

Invariant: files are judged by their names and sizes, and, if a contract asks for more, by an expression that is
evaluated inside the sandbox; no content is read here. A check shows that a file has the promised form, not that it is
honest: an agent's pickle runs code in the process that checks it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.tools.sandbox import matches
from recipe.dag.tools.sandbox_client import RunResult

NO_FILE = "there is no such regular file"
EMPTY = "it is empty"
_CHECKED = 20
"""Files of one pattern that are checked."""
_PROBLEM_CHARS = 400


@dataclass(frozen=True)
class Artifact:
    """A file that an agent has to make. check: an expression that must hold in the sandbox for the file `path`; ""
    if its size alone counts."""

    pattern: str
    check: str = ""


def contract_of(declared: Any) -> dict[str, tuple[Artifact, ...]]:
    """Return the artifacts by agent. Raises UserError."""
    if not isinstance(declared, Mapping):
        raise UserError("Workspace: `contract` must map agents to lists of files, as in {analyst: [submission.csv]}")
    contract = {}
    for agent, files in declared.items():
        if isinstance(files, str) or not isinstance(files, Sequence):
            raise UserError(f"Workspace: contract.{agent} must be a list of files, not {files!r}")
        contract[str(agent)] = tuple(_artifact(agent, file) for file in files)
    return contract


def _artifact(agent: str, file: Any) -> Artifact:
    if isinstance(file, str) and file:
        return Artifact(file)
    if isinstance(file, Mapping) and set(file) == {"file", "check"} and all(isinstance(v, str) for v in file.values()):
        try:
            compile(file["check"], "check", "eval")
        except (SyntaxError, ValueError) as error:
            raise UserError(f"Workspace: contract.{agent}: check of {file['file']} is no expression: {error}") from None
        return Artifact(file["file"], file["check"])
    raise UserError(
        f"Workspace: contract.{agent} names {file!r}; a file is a name, a pattern such as '*.pkl', or "
        "{file: X_test.pkl, check: 'len(load(path)) > 0'}"
    )


def problems_of_sizes(artifacts: Sequence[Artifact], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return what is wrong with each artifact by its pattern, as far as names and `sizes` in bytes tell."""
    problems = {}
    for artifact in artifacts:
        found = [size for name, size in sizes.items() if matches(name, artifact.pattern)]
        if not any(found):
            problems[artifact.pattern] = EMPTY if found else NO_FILE
    return problems


_PROGRAM = """\
import os, sys
# Modules that the agents left come last: a module `json` of theirs must not replace the real one.
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())] + [os.getcwd()]
import ast, importlib.util, json
marker, checks = json.loads(sys.stdin.readline())
MODULES = {"np": "numpy", "pd": "pandas", **{name: name for name in ("csv", "json", "math", "os", "pickle")}}
def load(path):
    import pickle
    try:
        with open(path, "rb") as file:
            return pickle.load(file)
    except Exception:
        if importlib.util.find_spec("joblib") is None:
            raise
        return importlib.import_module("joblib").load(path)
results = []
for number, path, check in checks:
    try:
        names = {node.id for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Name)}
        space = {name: importlib.import_module(module) for name, module in MODULES.items() if name in names}
        passed = eval(check, {**space, "path": path, "load": load})
        results.append([number, "" if passed else "`" + check + "` does not hold"])
    except BaseException as error:
        results.append([number, "`" + check + "` raises " + type(error).__name__ + ": " + str(error)[:200]])
sys.stdout.write("\\n" + marker + json.dumps(results) + "\\n")
"""


class Checks:
    """The checks of the artifacts that exist, as one program."""

    def __init__(self, artifacts: Sequence[Artifact], sizes: Mapping[str, int]) -> None:
        self._artifacts = [artifact for artifact in artifacts if artifact.check]
        self._marker = secrets.token_hex(8)
        self._jobs = [
            [number, name, artifact.check]
            for number, artifact in enumerate(self._artifacts)
            for name in [name for name, size in sizes.items() if size and matches(name, artifact.pattern)][:_CHECKED]
        ]

    @property
    def program(self) -> str:
        """Empty if there is nothing to check."""
        return _PROGRAM if self._jobs else ""

    @property
    def stdin(self) -> str:
        return json.dumps([self._marker, self._jobs]) + "\n"

    def problems(self, result: RunResult) -> dict[str, str]:
        """Return what is wrong with each artifact by its pattern. `result`: of the program."""
        patterns = {self._artifacts[number].pattern for number, _, _ in self._jobs}
        _, separator, line = result.stdout.rpartition("\n" + self._marker)
        if not separator:
            how = "did not end in time" if result.status == "timeout" else f"ended with exit code {result.return_code}"
            return dict.fromkeys(patterns, f"its check {how}")
        try:
            results = json.loads(line.partition("\n")[0])
            # A pickle that the check loads can write what it likes.
            if not all(type(number) is int and 0 <= number < len(self._artifacts) for number, _ in results):
                raise ValueError("no artifact has this number")
            return {self._artifacts[number].pattern: _line(problem) for number, problem in results if problem}
        except (ValueError, TypeError, RecursionError):
            return dict.fromkeys(patterns, "its check was disturbed")


def _line(problem: Any) -> str:
    """Return a text that a hostile file may have chosen as one printable line."""
    text = " ".join(str(problem).split())[:_PROBLEM_CHARS]
    return text if text.isprintable() else ascii(text)
