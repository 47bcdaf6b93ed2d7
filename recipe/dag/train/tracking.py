"""verl's Tracking with this project's defaults: offline without an API key, files inside the run's folder.

Invariant: a tracker that cannot start is a UserError before training; one that fails later never stops a step. A
resumed run continues its earlier run in the tracker, whose id is in `run/tracking.json`. No tracker receives a secret
of the configuration, and the process's environment is restored afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.report.journal import lines_until
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.run_record import FOLDER as RUN_FOLDER
from recipe.dag.report.secrets import without_secrets
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)


def backends_of(trackers: str | ListConfig | None) -> list[str]:
    """Return the names in `trainer.logger`, one or several, without the console, for which report/console.py prints a
    shorter line."""
    names = [trackers] if isinstance(trackers, str) else list(trackers or ())
    return [name for name in names if name != "console"]


def run_id(out: Path, *, new_run: bool) -> str:
    """Return the trackers' id of the run in `out`; make and store one if there is none, or for a `new_run`. Raises
    UserError."""
    path = out / RUN_FOLDER / "tracking.json"
    if not new_run and path.is_file():
        try:
            return str(json.loads(path.read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: damaged ({type(error).__name__}: {error}); write the id of the trackers' run into it, as "
                '{"id": "..."}, or delete it to continue as a new run there'
            ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    new_id = uuid.uuid4().hex[:8]
    replace_file(path, [to_json({"id": new_id}, indent=1), b"\n"])
    return new_id


def _defaults(out: Path, tracker_id: str) -> dict[str, str]:
    """Return defaults of the environment variables that trackers read."""
    values = {
        "TENSORBOARD_DIR": str(out / "tensorboard"),
        "VERL_FILE_LOGGER_PATH": str(out / "tracking.jsonl"),
        "SWANLAB_LOG_DIR": str(out / "swanlab"),
        "WANDB_DIR": str(out),  # wandb creates a folder `wandb` in it
    }
    for name in ("SWANLAB", "WANDB"):
        values |= {f"{name}_RUN_ID": tracker_id, f"{name}_RESUME": "allow"}
        if not os.environ.get(f"{name}_API_KEY"):
            values[f"{name}_MODE"] = "offline"
    return values


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Set the variables of `defaults` that are not set in the process's environment, and unset them afterwards."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield os.environ
    finally:
        for name in added:
            os.environ.pop(name, None)


def _lines_of(path: Path, step: int) -> bytes:
    return b"".join(lines_until(path, step)) if step and path.is_file() else b""


class Trackers:
    """The backends of `trainer.logger`."""

    def __init__(self, config: DictConfig, workflow: Workflow | None = None, *, step: int = 0):
        """`workflow`: None for supervised fine-tuning. `step`: the one that the run resumes after; 0 for a run from the
        beginning, which gets a new id."""
        from verl.utils.tracking import Tracking

        out = Path(config.output_dir).absolute()
        backends = backends_of(config.trainer.logger)
        resolved = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))  # a DictConfig becomes a dict
        settings = resolved if workflow is None else {**resolved, "dag": workflow.model_dump(mode="json")}
        names = config.trainer.project_name, config.trainer.experiment_name
        with _environment(_defaults(out, run_id(out, new_run=step == 0))) as environment:
            earlier_lines = _lines_of(Path(environment["VERL_FILE_LOGGER_PATH"]), step) if "file" in backends else b""
            try:
                self.tracking = Tracking(*names, backends, without_secrets(settings))
            except (AssertionError, ImportError, ValueError) as error:
                raise UserError(f"trainer.logger={backends}: {str(error) or type(error).__name__}") from error
        if earlier_lines:  # verl empties the file when it opens it
            self.tracking.logger["file"].fp.write(earlier_lines)

    def log(self, metrics: dict[str, float], step: int) -> None:
        try:
            self.tracking.log(data=metrics, step=step)
        except Exception:
            logger.exception("a tracker failed at step %d; training continues", step)

    def finish(self, exit_code: int) -> None:
        self.tracking.finish(exit_code=exit_code)
