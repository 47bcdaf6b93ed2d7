"""What the flags ask of the configuration as a whole.

Invariant: pure but for the row counts of parquet files; what is wrong is a UserError before anything is started, on the
flag where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.placement import plan_pools
from recipe.dag.settings.kinds import COUNT, Given, Kind, or_null, whole
from recipe.dag.workflow.machine import this_machine
from recipe.dag.workflow.schema import Workflow
from recipe.marft.credit import COMPARING
from recipe.marft.flags import ACTOR, CRITIC, SERVER
from recipe.marft.rules import Translation


def check_flags(out: Translation, config: DictConfig) -> None:
    """Raises UserError for a flag that asks for something which the configuration does not have."""
    estimator = out.given.get("algorithm.adv_estimator")
    if estimator is not None and estimator.value in COMPARING and config.actor_rollout_ref.rollout.n < 2:
        raise UserError(f"{estimator}: compares the episodes of a sample, and there is one; add rollout.n=8")
    rows = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    for owner, size in ((ACTOR, rows), (CRITIC, config.critic.ppo_micro_batch_size_per_gpu or rows)):
        by_tokens = out.given.get(f"{owner}.use_dynamic_bsz")
        if by_tokens is not None and not by_tokens.value and size is None:
            raise UserError(f"{by_tokens}: batches are then made by rows; add {owner}.ppo_micro_batch_size_per_gpu=4")


def steps_of(out: Translation, config: DictConfig) -> int:
    epochs = out.given["trainer.total_epochs"]
    if "trainer.total_training_steps" in out.overrides:
        steps = out.overrides["trainer.total_training_steps"]
        raise UserError(f"{epochs}: trainer.total_training_steps={steps} says otherwise of the same; give one of them")
    rows = _rows(epochs, config.data.train_files)
    limit = whole_number(config, "data.train_max_samples", or_null(whole(1, -1)))
    rows = rows if limit is None or limit < 0 else min(rows, limit)
    return max(1, epochs.value * rows // whole_number(config, "data.train_batch_size", COUNT))


def _rows(epochs: Given, files: str | Sequence[str] | None) -> int:
    names = [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files or ())]
    if not names or not all(name.suffix == ".parquet" and name.is_file() for name in names):
        raise UserError(
            f"{epochs}: only for parquet data.train_files that are there; give trainer.total_training_steps"
        )
    try:
        return sum(pq.read_metadata(name).num_rows for name in names)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{epochs}: data.train_files cannot be read: {str(error).splitlines()[0]}") from error


def whole_number(config: DictConfig, key: str, kind: Kind) -> int | None:
    value = OmegaConf.select(config, key)
    if not kind.accepts(value):
        raise UserError(f"{key}={value}: it takes {kind.takes}")
    return value


def check_policies(config: DictConfig, flow: Workflow) -> None:
    """That there are GPUs for all policies, and that each one's configuration fits them and the lengths of its rows."""
    platform = "cpu" if config.platform == "cpu" else "cuda"
    visible = config.trainer.n_gpus_per_node or max(len(this_machine().gpu_bytes), 1)
    for share in plan_pools(flow, nnodes=config.trainer.nnodes, n_gpus_per_node=visible):
        gpus = sum(share.processes_on_nodes)
        for name in share.policies:
            critic = "" if flow.critic_owner(name) == name else None
            made = policy_config(
                config, flow, name, model_path="", critic_path=critic, updates=1, platform=platform
            ).actor_rollout_ref
            size = made.rollout.tensor_model_parallel_size
            if platform == "cuda" and gpus % size:
                message = f"servers of {size} GPUs do not fit into the {gpus} of policy `{name}`"
                raise UserError(f"{SERVER}.tensor_model_parallel_size={size}: {message}; see trainer.n_gpus_per_node")
