"""verl's Tracking with this project's defaults: offline without a key, files inside the run's folder.

Invariant: a tracker that cannot start is a UserError before training; one that fails later never stops a step. A run
that resumes goes on in the tracker's run that it began, whose id is in `run/tracking.json`. No tracker is given a
secret of the configuration, and the process's environment is left as it was.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.report.journal import lines_until
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.run_record import FOLDER as RUN_FOLDER
from recipe.dag.report.secrets import without_secrets
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)


def backends_of(given: str | ListConfig | None) -> list[str]:
    """`trainer.logger`, one name or several, without the console, which has its own, shorter line
    (report/console.py)."""
    names = [given] if isinstance(given, str) else list(given or ())
    return [name for name in names if name != "console"]


def run_id(out: Path, *, anew: bool) -> str:
    """Return the id of the run in `out` for trackers, made and kept there where there is none yet or it starts
    `anew`."""
    path = out / RUN_FOLDER / "tracking.json"
    if not anew and path.is_file():
        return json.loads(path.read_text())["id"]
    path.parent.mkdir(parents=True, exist_ok=True)
    made = uuid.uuid4().hex[:8]
    replace_file(path, [to_json({"id": made}, indent=1), b"\n"])
    return made


def _defaults(out: Path, id: str) -> dict[str, str]:
    """What trackers read from the environment, for variables that the user did not set."""
    values = {
        "TENSORBOARD_DIR": str(out / "tensorboard"),
        "VERL_FILE_LOGGER_PATH": str(out / "tracking.jsonl"),
        "SWANLAB_LOG_DIR": str(out / "swanlab"),
        "WANDB_DIR": str(out),  # it makes a folder `wandb` there
    }
    for name in ("SWANLAB", "WANDB"):
        values |= {f"{name}_RUN_ID": id, f"{name}_RESUME": "allow"}
        if not os.environ.get(f"{name}_API_KEY"):
            values[f"{name}_MODE"] = "offline"
    return values


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The process's environment with `defaults` for what is not set, as it was afterwards."""
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
    def __init__(self, config: DictConfig, workflow: Workflow, *, step: int = 0):
        """`step`: the one that the run resumes after; 0 for a run that starts anew, with an id of its own."""
        from verl.utils.tracking import Tracking

        out = Path(config.output_dir).absolute()
        backends = backends_of(config.trainer.logger)
        settings = {**OmegaConf.to_container(config, resolve=True), "dag": workflow.model_dump(mode="json")}
        names = config.trainer.project_name, config.trainer.experiment_name
        with _environment(_defaults(out, run_id(out, anew=step == 0))) as environment:
            kept = _lines_of(Path(environment["VERL_FILE_LOGGER_PATH"]), step) if "file" in backends else b""
            try:
                self.tracking = Tracking(*names, backends, without_secrets(settings))
            except (AssertionError, ImportError, ValueError) as error:
                raise UserError(f"trainer.logger={backends}: {str(error) or type(error).__name__}") from error
        if kept:  # verl empties the file
            self.tracking.logger["file"].fp.write(kept)

    def log(self, metrics: dict[str, float], step: int) -> None:
        try:
            self.tracking.log(data=metrics, step=step)
        except Exception:
            logger.exception("a tracker failed at step %d; training goes on", step)

    def finish(self, exit_code: int) -> None:
        self.tracking.finish(exit_code=exit_code)
