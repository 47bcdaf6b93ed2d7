"""verl's actor/rollout/reference worker, plus the policy's critic and this package's engines and rollouts.

Invariant: importing this module and constructing its worker registers everything that the worker process needs: the
FSDP2 engines for packed rows, the value engine, the attention, the losses, the CPU rollout adapter, and an SGLang
adapter that finds the policy's server. One process per rank holds all models of a policy, which take turns. Every
process group of the process, also those that verl makes for its meshes, has the time-out `nccl_timeout`.
No class of verl is replaced; a few names in its modules are: entries of its registry of rollouts, its selection and
padding of rows, how weights are sent to SGLang, for adapters its sharding, and on a CPU its offloading.
"""

from __future__ import annotations

import random
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
import verl.workers.engine.fsdp.transformer_impl as fsdp
import verl.workers.rollout.base as rollout_base
from tensordict import TensorDict
from torch.distributed import init_process_group, is_initialized
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

from recipe.dag.policy import canary, engine, losses, value_model, varlen
from recipe.dag.policy.safe_load import weights_only
from recipe.dag.policy.shards import SHARDS

ONE_TO_ALL = Dispatch.ONE_TO_ALL  # pyright: ignore[reportAttributeAccessIssue]  # verl adds its members at run time

# verl has no function to register an adapter
rollout_base._ROLLOUT_REGISTRY[("cpu", "async")] = "recipe.dag.platform.rollout.CPUServerAdapter"
rollout_base._ROLLOUT_REGISTRY[("sglang", "async")] = "recipe.dag.policy.sglang.PolicyServerAdapter"


def register_engines(actor: type[engine.PolicyEngine] = engine.PolicyEngine) -> None:
    """Register this package's engines and attention with verl and transformers in this process."""
    varlen.register()
    engine.register(actor)
    if get_device_name() == "cpu":
        # verl offloads a forward-only engine to pinned memory, which needs an accelerator
        fsdp.CPUOffloadPolicy = lambda **kwargs: None  # pyright: ignore[reportPrivateImportUsage]


class PolicyWorker(ActorRolloutRefWorker):
    """One rank of one policy. `critic`: verl's critic configuration, or None for a policy without a critic."""

    def __init__(self, config, role: str, critic=None, **kwargs):
        super().__init__(config=config, role=role, **kwargs)
        self.seed_random_state(0)  # before weights without a checkpoint, such as a critic's head, are initialized
        self.critic_config = critic
        self.critic: TrainingWorker | None = None
        self.canary: list[int] = []
        self.canary_scores: list[float] | None = None
        """Log-probs of the canary by the actor's weights; None if they have changed since."""
        self.canary_seconds = 0.0
        losses.register()
        register_engines(self.engine_class())
        self.timeout = timedelta(seconds=config.nccl_timeout)
        if get_device_name() == "cpu" and not is_initialized():
            # verl would request "cpu:gloo,cpu:gloo", which torch rejects
            init_process_group("gloo", rank=self.rank, world_size=self.world_size, timeout=self.timeout)
        elif not is_initialized():  # verl itself would do so in init_model, with torch's time-out
            initialize_global_process_group_ray(timeout_second=config.nccl_timeout)

    def engine_class(self) -> type[engine.PolicyEngine]:
        """Return the class of the actor's engine."""
        return engine.PolicyEngine

    @register(dispatch_mode=ONE_TO_ALL)
    def seed_random_state(self, step: int):
        """Set the random state of Python, numpy and torch from the run's seed, the policy, the rank and `step`.

        A step's state does not depend on earlier steps, so a resumed run repeats an uninterrupted one.
        """
        policy = self.config.rollout.custom["policy"]
        words = np.random.SeedSequence(
            [self.config.actor.data_loader_seed, zlib.crc32(policy.encode()), self.rank, step]
        ).generate_state(2)
        random.seed(int(words[0]))
        np.random.seed(words[0])
        # torch.manual_seed seeds all devices
        torch.manual_seed(int(words[0]) << 32 | int(words[1]))

    @register(dispatch_mode=ONE_TO_ALL)
    def init_model(self):
        super().init_model()
        if "actor" in self.role:
            assert self.actor is not None  # super().init_model() builds it for this role
            # instead of verl's own, with the dataclass that verl has made of the actor's configuration
            self.actor.set_loss_fn(partial(losses.actor_loss, config=self.loss_fn.keywords["config"]))
            if self.config.rollout.quantization is None and not self._engine._qat_enabled:  # those read the trainer's
                self._engine.served_dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
        if self.critic_config is not None:
            value_model.register()
            config = omega_conf_to_dataclass(self.critic_config)
            self.critic = TrainingWorker(config=training_config(config))
            self.critic.reset()  # verl's name for building the engine
            self.critic.set_loss_fn(partial(value_loss, config=config))
            # the mesh by which the driver splits the batches of compute_values and update_critic
            self.set_dispatch_collect(mesh_name="critic", **self.critic.get_dispatch_collect())
            # the servers start next, and see the memory that torch has cached as used
            aggressive_empty_cache(force_sync=True)
        # last: every model above has made process groups for its mesh
        set_timeout_of_process_groups(self.timeout)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        self._engine.holds_schedule = tu.pop(data, "more_follow", default=False)
        if self.scores_later:
            self.canary_scores = None
        if not self.canary or self.scores_later or self._engine.holds_schedule:  # the step's last update scores it
            return super().update_actor(data)
        with self._engine.train_mode():  # loads what is offloaded, once for the update and the canary
            tu.assign_non_tensor(data, disable_auto_offload=True)
            output = super().update_actor(data)
            self._score_canary(loaded=True)
        return output

    @property
    def scores_later(self) -> bool:
        """Whether the canary is scored between a step's updates and the servers' answers, not by an update."""
        return False

    @register(dispatch_mode=ONE_TO_ALL)
    def free_cache(self) -> None:
        """Return to the device what torch keeps of it for this process without using it."""
        get_torch_device().empty_cache()

    @register(dispatch_mode=ONE_TO_ALL)
    def score_canary(self, prompt: list[int]) -> tuple[list[float], float]:
        """Return the log-probs of the prompt's tokens but the first by the actor's weights, and the seconds that this
        took since the last call. From the first call on, every update scores the prompt while its weights are loaded,
        unless `scores_later`."""
        if self.canary_scores is None or prompt != self.canary:
            self.canary = prompt
            self._score_canary(loaded=False)
            get_torch_device().empty_cache()  # a server may start next, and sees what torch has cached as used
        seconds, self.canary_seconds = self.canary_seconds, 0.0
        return self.canary_scores or [], seconds

    def _score_canary(self, *, loaded: bool) -> None:
        assert self.actor is not None
        get_torch_device().synchronize()  # the update may still be running
        started = time.monotonic()
        self.canary_scores = canary.score(self.actor, self.canary, loaded=loaded)
        self.canary_seconds += time.monotonic() - started

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        output = self._critic().infer_batch(data=data)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def update_critic(self, data: TensorDict) -> TensorDict | None:
        output = self._critic().train_mini_batch(data=data)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=ONE_TO_ALL)
    def save_critic(self, local_path: str, global_step: int = 0):
        self._critic().save_checkpoint(local_path, None, global_step)

    @register(dispatch_mode=ONE_TO_ALL)
    def save_weights(self, folder: str):
        """Write the actor's weights to `folder`/huggingface, in the form of Hugging Face."""
        assert self.actor is not None
        engine: Any = self.actor.engine  # FSDP's, which has one
        manager = engine.checkpoint_manager
        contents, manager.checkpoint_save_contents = manager.checkpoint_save_contents, ["hf_model"]
        try:
            self.save_checkpoint(folder)
        finally:
            manager.checkpoint_save_contents = contents

    @register(dispatch_mode=ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False):
        self.canary_scores = None
        with weights_only(local_path):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    @register(dispatch_mode=ONE_TO_ALL)
    def load_critic(self, local_path: str):
        with weights_only(local_path):
            self._critic().load_checkpoint(local_path)

    @register(dispatch_mode=ONE_TO_ALL)
    @torch.no_grad()
    def renew_reference(self):
        """Copy the actor's weights to the reference, on each rank its own part."""
        weights = self._engine.module.state_dict()
        for name, weight in self._reference_weights().items():
            weight.copy_(_own_part(weights[name]))

    @register(dispatch_mode=ONE_TO_ALL)
    def save_reference(self, folder: str):
        file = self._reference_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        # a clone: torch would save all of the memory that a view is a part of
        torch.save({name: weight.cpu().clone() for name, weight in self._reference_weights().items()}, file)

    @register(dispatch_mode=ONE_TO_ALL)
    @torch.no_grad()
    def load_reference(self, folder: str):
        with weights_only(folder):
            saved = torch.load(self._reference_file(folder), map_location="cpu")
        for name, weight in self._reference_weights().items():
            weight.copy_(saved[name])

    @property
    def _engine(self) -> engine.PolicyEngine:
        assert self.actor is not None  # only workers with an actor are asked to change it
        return self.actor.engine  # pyright: ignore[reportReturnType]  # of engine_class

    def _reference_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the reference's weights, by their names in the model."""
        assert self.ref is not None  # only policies with a reference renew it
        # a state dict, not the parameters: FSDP shards the weights again that a pass has left gathered
        module = self.ref.engine.module  # pyright: ignore[reportAttributeAccessIssue]  # of FSDP engines
        return {name: _own_part(weight) for name, weight in module.state_dict().items()}

    def _reference_file(self, folder: str) -> Path:
        return Path(folder) / f"{SHARDS['model']}_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _critic(self) -> TrainingWorker:
        assert self.critic is not None  # the critic's methods are called only for policies that have one
        return self.critic


def _own_part(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def set_timeout_of_process_groups(timeout: timedelta) -> None:
    """Set the time-out of the collectives of every process group in this process.

    `init_process_group` sets that of the default group only: torch gives its own default (10 minutes on NCCL, 30 on
    gloo) to the groups of a device mesh.
    """
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timeout, group)


def training_config(critic) -> TrainingWorkerConfig:
    """Return the configuration of verl's TrainingWorker for a critic, with equal micro-batches forward and backward."""
    engine = critic.engine
    engine.use_dynamic_bsz = critic.use_dynamic_bsz
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
        profiler_config=critic.profiler,
    )
