"""Checks of flags that depend on the whole configuration.

Invariant: pure, except that the row counts of parquet files are read. Errors are UserErrors, raised before anything is
started, that begin with the flag if one caused them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.policy.config import policy_config
from recipe.dag.settings.kinds import COUNT, Argument, ValueKind, or_null, whole
from recipe.dag.settings.pools import plan_pools
from recipe.dag.workflow.machine import this_machine
from recipe.dag.workflow.schema import Workflow
from recipe.marft.credit import COMPARING
from recipe.marft.flags import ACTOR, CRITIC, SERVER
from recipe.marft.rules import Translation


def check_flags(out: Translation, config: DictConfig) -> None:
    """Raise UserError for a flag that does not fit the rest of the configuration."""
    estimator = out.arguments.get("algorithm.adv_estimator")
    if estimator is not None and estimator.value in COMPARING and config.actor_rollout_ref.rollout.n < 2:
        raise UserError(f"{estimator}: compares the episodes of a sample, but there is only one; add rollout.n=8")
    rows = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    for owner, size in ((ACTOR, rows), (CRITIC, config.critic.ppo_micro_batch_size_per_gpu or rows)):
        by_tokens = out.arguments.get(f"{owner}.use_dynamic_bsz")
        if by_tokens is not None and not by_tokens.value and size is None:
            raise UserError(f"{by_tokens}: batches are then made by rows; add {owner}.ppo_micro_batch_size_per_gpu=4")


def steps_of(out: Translation, config: DictConfig) -> int:
    """Return the number of steps in `trainer.total_epochs`. Raises UserError."""
    epochs = out.arguments["trainer.total_epochs"]
    if "trainer.total_training_steps" in out.overrides:
        steps = out.overrides["trainer.total_training_steps"]
        raise UserError(f"{epochs}: trainer.total_training_steps={steps} conflicts with it; pass only one of them")
    rows = _rows(epochs, config.data.train_files)
    limit = checked_value(config, "data.train_max_samples", or_null(whole(1, -1)))
    rows = rows if limit is None or limit < 0 else min(rows, limit)
    return max(1, epochs.value * rows // checked_value(config, "data.train_batch_size", COUNT))


def _rows(epochs: Argument, files: str | Sequence[str] | None) -> int:
    paths = [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files or ())]
    if not paths or not all(path.suffix == ".parquet" and path.is_file() for path in paths):
        raise UserError(
            f"{epochs}: needs data.train_files that exist and are parquet; pass trainer.total_training_steps instead"
        )
    try:
        return sum(pq.read_metadata(path).num_rows for path in paths)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{epochs}: data.train_files cannot be read: {str(error).splitlines()[0]}") from error


def checked_value(config: DictConfig, key: str, kind: ValueKind) -> Any:
    """Return the key's value if it is of this kind. Raises UserError."""
    value = OmegaConf.select(config, key)
    if not kind.accepts(value):
        raise UserError(f"{key}={value}: it takes {kind.takes}")
    return value


def check_policies(config: DictConfig, flow: Workflow) -> None:
    """Raise UserError if policies do not fit the GPUs, or their configurations do not fit the lengths of rows."""
    platform = "cpu" if config.platform == "cpu" else "cuda"
    visible = config.trainer.n_gpus_per_node or max(len(this_machine().gpu_bytes), 1)
    for pool in plan_pools(flow, nnodes=config.trainer.nnodes, n_gpus_per_node=visible):
        gpus = sum(pool.processes_on_nodes)
        for name in pool.policies:
            critic = "" if flow.critic_owner(name) == name else None
            policy = policy_config(
                config, flow, name, model_path="", critic_path=critic, updates=1, platform=platform
            ).actor_rollout_ref
            size = policy.rollout.tensor_model_parallel_size
            if platform == "cuda" and gpus % size:
                message = f"servers of {size} GPUs do not divide the {gpus} GPUs of policy `{name}`"
                raise UserError(f"{SERVER}.tensor_model_parallel_size={size}: {message}; set trainer.n_gpus_per_node")
