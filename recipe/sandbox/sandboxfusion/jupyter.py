"""SandboxFusion's `/run_jupyter`: runs cells that share one interpreter as one job.

Invariant: the cells and their results pass through the driver's stdin and stdout, so a call adds no file to a session.
What a cell shows is checked before it is passed on, and what is passed on is valid JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from recipe.sandbox import wire
from recipe.sandbox.job import Job
from recipe.sandbox.jobs import JobRequest
from recipe.sandbox.limits import MAX_RUN_S
from recipe.sandbox.outcome import Execution, SandboxError

_ANSWER_BYTES = 16 << 20
"""Limit on the results of all cells together, as JSON."""
_BRACKETS = 200_000
"""Limit on the brackets of a cell's results: decoding lists and objects is what costs time."""
_LINE = TypeAdapter(tuple[str, str, str])


class RunJupyterRequest(wire.JobRequest):
    cells: list[wire.Text]
    cell_timeout: float = 0
    """Seconds; at 0 and below there is no limit."""
    total_timeout: float = 45
    kernel: Literal["python3"] = "python3"


class Shown(BaseModel):
    """The interpreter's answer for a cell; it may have been made by the cell."""

    model_config = ConfigDict(extra="forbid")

    display: list[dict[str, JsonValue]]
    error: list[dict[str, JsonValue]]


def job_request(request: RunJupyterRequest, client: str) -> JobRequest:
    """Return the job that runs the cells. Raises SandboxError."""
    wire.check_seconds("cell_timeout", request.cell_timeout)
    stdin = {
        "cells": request.cells,
        "cell_timeout": min(request.cell_timeout, MAX_RUN_S),
        "answer_bytes": _ANSWER_BYTES,
    }
    job = Job(
        code=_driver(),
        timeout_s=request.total_timeout,
        stdin=json.dumps(stdin),
        files=request.files,
        fetch=request.fetch_files,
    )
    return JobRequest(
        client,
        job,
        memory_mb=request.memory_limit_mb,
        output_bytes=_ANSWER_BYTES,
        session_id=request.session_id,
        share=request.share,
    )


def answer(request: RunJupyterRequest, execution: Execution) -> tuple[str, bytes]:
    """Return the status and the answer as JSON. The status is Success if every cell was answered, even if one raised;
    there are no cells if the time ran out."""
    run = execution.run
    assert run is not None  # only a program that does not compile has no run
    cells = _cells(run.stdout) if run.status == "finished" else []
    complete = run.return_code == 0 and len(cells) == len(request.cells)
    driver = wire.result(dataclasses.replace(run, stdout=""))
    return _body("Success" if complete else "Failed", "", driver, cells, execution)


def refusal(reason: SandboxError) -> tuple[str, bytes]:
    return _body("SandboxError", f"exception on running jupyter: {reason} None", None, [], Execution(None))


def _body(
    status: str,
    message: str,
    driver: dict[str, Any] | None,
    cells: list[dict[str, Any]],
    execution: Execution,
) -> tuple[str, bytes]:
    body = {
        "status": status,
        "message": message,
        "driver": driver,
        "cells": cells,
        "executor_pod_name": wire.pod_name(),
        "files": wire.files(execution),
    }
    # JSON has no number for NaN and infinity.
    return status, to_json(body, inf_nan_mode="null")


def _cells(stdout: str) -> list[dict[str, Any]]:
    """Return the finished cells, up to the first whose results are not what SandboxFusion's clients expect."""
    cells = []
    for line in stdout.split("\n")[:-1]:
        try:
            printed, warned, outputs = _LINE.validate_json(line)
            if outputs.count("[") + outputs.count("{") > _BRACKETS:
                break
            cells.append({"stdout": printed, "stderr": warned, **Shown.model_validate_json(outputs).model_dump()})
        except ValidationError:
            break
    return cells


@functools.cache
def _driver() -> str:
    return Path(__file__).with_name("jupyter_driver.py").read_text(encoding="utf-8")
