"""SandboxFusion's `/run_jupyter`: cells that share one interpreter, run as one job.

Invariant: the cells and their results travel by the driver's stdin and stdout, so nothing of a call lands in a session.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from recipe.dag.sandbox import wire
from recipe.dag.sandbox.jobs import Job
from recipe.dag.sandbox.outcome import Execution, SandboxError

_ANSWER_BYTES = 16 << 20
"""All cells' results together, as JSON."""
_KEYS = {"stdout", "stderr", "display", "error"}


def job(request: wire.RunJupyterRequest, client: str) -> Job:
    """Raises SandboxError."""
    wire.check_seconds("cell_timeout", request.cell_timeout)
    return Job(
        client=client,
        code=_driver(),
        timeout_s=request.total_timeout,
        stdin=json.dumps({"cells": request.cells, "cell_timeout": min(request.cell_timeout, wire.MAX_RUN_S)}),
        files=request.files,
        fetch=request.fetch_files,
        memory_mb=request.memory_limit_MB,
        output_bytes=_ANSWER_BYTES,
        session_id=request.session_id,
        share=request.share,
    )


def answer(request: wire.RunJupyterRequest, execution: Execution) -> dict[str, Any]:
    """Success when every cell was run, raising or not; cells are empty unless the driver ended by itself."""
    run = execution.run
    cells = _cells(run.stdout) if run.status == "finished" else []
    complete = run.return_code == 0 and len(cells) == len(request.cells)
    return {
        "status": "Success" if complete else "Failed",
        "message": "",
        "driver": wire.result(dataclasses.replace(run, stdout="")),
        "cells": cells,
        "executor_pod_name": wire.pod_name(),
        "files": dict(execution.files),
    }


def refusal(reason: SandboxError) -> dict[str, Any]:
    return {
        "status": "SandboxError",
        "message": f"exception on running jupyter: {reason} None",
        "driver": None,
        "cells": [],
        "executor_pod_name": wire.pod_name(),
        "files": {},
    }


def _cells(stdout: str) -> list[dict[str, Any]]:
    """The finished cells; what user code garbled ends the list."""
    cells = []
    for line in stdout.split("\n")[:-1]:
        try:
            cell = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(cell, dict) or cell.keys() != _KEYS:
            break
        cells.append(cell)
    return cells


@functools.cache
def _driver() -> str:
    return Path(__file__).with_name("jupyter_driver.py").read_text(encoding="utf-8")
