"""SandboxFusion's `/run_code` as JSON: what comes in, what goes out.

Invariant: a request is checked whole before anything runs; `Invalid` says what is wrong in the shape of a 422 answer.
Every outcome of a program is a 200; `SandboxError` in its status means that the program never ran.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.sandbox.execute import LANGUAGES, Execution, Outcome

MAX_RUN_S = 3600.0


class Invalid(Exception):
    """`detail` is the list that a 422 answer carries."""

    def __init__(self, where: tuple[str, ...], message: str):
        super().__init__(message)
        self.detail = [{"type": "value_error", "loc": ["body", *where], "msg": message}]


@dataclass(frozen=True)
class RunCodeRequest:
    """The field names, and the defaults, are SandboxFusion's. Unknown fields are ignored, as it does."""

    code: str
    language: str
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    memory_limit_MB: int = -1
    """Per process. 0 and below: this server's own limit, where SandboxFusion has none."""
    stdin: str | None = None
    files: dict[str, str | None] = field(default_factory=dict)
    fetch_files: list[str] = field(default_factory=list)


def parse_request(data: Any) -> RunCodeRequest:
    """Check decoded JSON. Raises Invalid."""
    if not isinstance(data, dict):
        raise Invalid((), "the body must be a JSON object")
    known = {entry.name for entry in dataclasses.fields(RunCodeRequest)}
    given = {name: value for name, value in data.items() if name in known}
    for name in ("code", "language"):
        if not isinstance(given.get(name), str):
            raise Invalid((name,), "a string is required")
    if given["language"] not in LANGUAGES:
        raise Invalid(("language",), f"must be one of {', '.join(LANGUAGES)}")
    for name in ("compile_timeout", "run_timeout"):
        if name in given:
            given[name] = min(_number(name, given[name]), MAX_RUN_S)
    if "memory_limit_MB" in given:
        given["memory_limit_MB"] = int(_number("memory_limit_MB", given["memory_limit_MB"]))
    files, fetch = given.get("files", {}), given.get("fetch_files", [])
    if not isinstance(files, dict) or not all(isinstance(value, str | None) for value in files.values()):
        raise Invalid(("files",), "must map names to base64 strings")
    if not isinstance(fetch, list) or not all(isinstance(name, str) for name in fetch):
        raise Invalid(("fetch_files",), "must be a list of names")
    if not isinstance(given.get("stdin"), str | None):
        raise Invalid(("stdin",), "must be a string or null")
    for name, texts in (("code", [given["code"]]), ("files", files), ("fetch_files", fetch)):
        if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
            raise Invalid((name,), "lone surrogates cannot be written as UTF-8")
    return RunCodeRequest(**given)


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or (name == "memory_limit_MB" and math.isinf(number)):
        raise Invalid((name,), "must be a number")
    return number


def answer(execution: Execution) -> dict[str, Any]:
    """The body for a program that ran, was stopped, or did not compile."""
    parts = [part for part in (execution.compile, execution.run) if part is not None]
    fine = all(part.return_code == 0 for part in parts)
    return _body("Success" if fine else "Failed", "", execution.compile, execution.run, execution.files)


def refusal(message: str) -> dict[str, Any]:
    """The body for a program that could not be run at all."""
    return _body("SandboxError", message, None, None, {})


def _body(
    status: str, message: str, compiled: Outcome | None, run: Outcome | None, files: dict[str, str]
) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": _result(compiled),
        "run_result": _result(run),
        "executor_pod_name": os.environ.get("MY_POD_NAME"),
        "files": files,
    }


def _result(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "status": "Finished" if outcome.status == "finished" else "TimeLimitExceeded",
        "execution_time": outcome.seconds,
        "return_code": outcome.return_code,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }
