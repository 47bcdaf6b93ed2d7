"""verl's Tracking with this project's defaults: offline without a key, files inside the run's folder.

Invariant: a tracker that cannot start is a UserError before training; one that fails later never stops a step.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)


def backends_of(given: str | ListConfig | None) -> list[str]:
    """`trainer.logger`, one name or several, without the console, which has its own, shorter line
    (report/console.py)."""
    names = [given] if isinstance(given, str) else list(given or ())
    return [name for name in names if name != "console"]


class Trackers:
    def __init__(self, config: DictConfig, workflow: Workflow):
        from verl.utils.tracking import Tracking

        out = Path(config.output_dir).absolute()
        backends = backends_of(config.trainer.logger)
        os.environ.setdefault("TENSORBOARD_DIR", str(out / "tensorboard"))
        os.environ.setdefault("VERL_FILE_LOGGER_PATH", str(out / "tracking.jsonl"))
        os.environ.setdefault("SWANLAB_LOG_DIR", str(out / "swanlab"))
        if not os.environ.get("SWANLAB_API_KEY"):
            os.environ.setdefault("SWANLAB_MODE", "offline")
        if not os.environ.get("WANDB_API_KEY"):
            os.environ.setdefault("WANDB_MODE", "offline")
        settings = {**OmegaConf.to_container(config, resolve=True), "dag": workflow.model_dump(mode="json")}
        try:
            self.tracking = Tracking(config.trainer.project_name, config.trainer.experiment_name, backends, settings)
        except (AssertionError, ImportError, ValueError) as error:
            raise UserError(f"trainer.logger={backends}: {str(error) or type(error).__name__}") from error

    def log(self, metrics: dict[str, float], step: int) -> None:
        try:
            self.tracking.log(data=metrics, step=step)
        except Exception:
            logger.exception("a tracker failed at step %d; training goes on", step)

    def finish(self, exit_code: int) -> None:
        self.tracking.finish(exit_code=exit_code)
