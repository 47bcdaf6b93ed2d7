"""The worker of a base and its adapters.

Invariant: `adapter` in a batch's metadata names the one that a pass computes with, and `update_actor` changes; a pass
without that name fails. The base is never written, neither to a checkpoint nor to a server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Awaitable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_id, get_torch_device, set_expandable_segments
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from recipe.dag.platform.adapter_weights import MappedWeights
from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.adapter_engine import AdapterEngine
from recipe.dag.policy.safe_load import weights_only
from recipe.dag.policy.worker import ONE_TO_ALL, PolicyWorker

ADAPTER = "adapter"
"""Key of a batch's metadata."""
ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class AdapterWorker(PolicyWorker):
    """One rank of a base with adapters."""

    def __init__(self, config: Any, role: str, *, adapters: tuple[TrainedAdapter, ...], **kwargs: Any):
        self.adapters = adapters
        self.used: str | None = None
        """The adapter in use; None: the base."""
        self.scores: dict[str | None, list[float] | None] = {}
        self.files: dict[str, MappedWeights] = {}
        """The folders that servers read -> their weights."""
        super().__init__(config, role, **kwargs)

    def engine_class(self) -> type[AdapterEngine]:
        return AdapterEngine.holding(self.adapters)

    @register(dispatch_mode=ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        assert self.actor is not None
        configs = {adapter.name: adapter.critic for adapter in self.adapters if adapter.critic is not None}
        losses = {name: partial(value_loss, config=omega_conf_to_dataclass(each)) for name, each in configs.items()}
        of_actors = cast(Any, self.actor.loss_fn)  # verl's class declares None
        self.actor.set_loss_fn(lambda **inputs: (losses.get(self.used or "") or of_actors)(**inputs))

    @property
    def canary_scores(self) -> list[float] | None:
        """Of the adapter in use: each has its own."""
        return self.scores.get(self.used)

    @canary_scores.setter
    def canary_scores(self, scores: list[float] | None) -> None:
        self.scores[self.used] = scores

    @register(dispatch_mode=ONE_TO_ALL)
    def score_canary(self, prompt: list[int], adapter: str | None = None) -> tuple[list[float], float]:
        self._use(adapter)
        return super().score_canary(prompt)

    @register(dispatch_mode=ACTOR)
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        self._use(_adapter_of(data))
        return super().compute_log_prob(data)

    @register(dispatch_mode=ACTOR)
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Compute the log-probs of the base, the reference of all its adapters."""
        self._use(_adapter_of(data))
        tu.assign_non_tensor(data, no_lora_adapter=True)
        return super().compute_log_prob(data)

    @register(dispatch_mode=ACTOR)
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        self._use(_adapter_of(data))
        return super().update_actor(data)

    @register(dispatch_mode=ACTOR)
    def compute_values(self, data: TensorDict) -> TensorDict | None:
        self._use(_adapter_of(data))
        return super().compute_values(data)

    @register(dispatch_mode=ACTOR)
    def update_critic(self, data: TensorDict) -> TensorDict | None:
        self._use(_adapter_of(data))
        return super().update_critic(data)

    def _critic(self) -> TrainingWorker:
        assert self.actor is not None
        return self.actor  # whose engine computes with the critic's adapter and head

    @register(dispatch_mode=ONE_TO_ALL)
    def save_adapter(self, name: str, folder: str) -> None:
        self._engine.save(name, Path(folder))

    @register(dispatch_mode=ONE_TO_ALL)
    def load_adapter(self, name: str, folder: str) -> None:
        with weights_only(folder):
            self._engine.load(name, Path(folder))
        if name in self.scores:  # critics never are
            self.scores[name] = None

    @register(dispatch_mode=ONE_TO_ALL)
    def write_adapter(self, name: str, folder: str, stale: list[str]) -> None:
        """Write an actor's adapter to a folder for this machine's servers, in the servers' type. It becomes the one of
        the folders `stale`, which no server reads any more: SGLang keeps parts of an adapter in its file's memory until
        the version is unloaded, and no request outlives the sleep after the next version."""
        pairs = self._engine.whole(name)
        if not self._leads:
            return
        for old in stale:
            if folder not in self.files and old in self.files:
                os.rename(old, folder)
                self.files[folder] = self.files.pop(old)
            else:
                shutil.rmtree(old, ignore_errors=True)
        if folder not in self.files:
            dtype = torch.float32 if get_torch_device() is torch.cpu else torch.bfloat16
            self.files[folder] = self._engine.make_file(name, Path(folder), dtype)
        self.files[folder].fill(pairs)

    @register(dispatch_mode=ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:  # verl's name
        """Wake the servers, which have loaded the adapters themselves: they have kept their base, or restore it from
        host memory."""
        engine, rollout = self._engine, self.config.rollout
        set_expandable_segments(False)
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)
        get_torch_device().empty_cache()
        torch.distributed.barrier()  # the other ranks' memory is free, too
        tasks: list[Awaitable[None]] = [asyncio.to_thread(self._score_changed)]
        if rollout.free_cache_engine:
            released = ["kv_cache"] if rollout.custom["keeps_weights"] else ["weights", "kv_cache"]
            tasks.append(self.rollout.resume(tags=released))
        await asyncio.gather(*tasks)
        set_expandable_segments(True)

    @property
    def scores_later(self) -> bool:
        return not self._engine.is_param_offload_enabled  # while servers wake, the weights are on the GPU

    def _score_changed(self) -> None:
        """Score the canary by each adapter that has changed since its last scores. The host takes longer to launch such
        a short pass than the GPU to compute it; meanwhile, servers wake."""
        if not self.canary or not self.scores_later:
            return
        get_torch_device().set_device(get_device_id())  # each thread has its own
        for name in [name for name, scores in self.scores.items() if scores is None]:
            self._use(name)
            self._score_canary(loaded=True)
        get_torch_device().empty_cache()

    @cached_property
    def _leads(self) -> bool:
        """Whether this is the first rank of its machine. A collective at first."""
        hosts: list[str] = [""] * self.world_size
        torch.distributed.all_gather_object(hosts, socket.gethostname())
        return hosts.index(socket.gethostname()) == self.rank

    def _use(self, adapter: str | None) -> None:
        self._engine.use(adapter)
        self.used = adapter

    @property
    def _engine(self) -> AdapterEngine:
        assert self.actor is not None  # made by init_model
        return self.actor.engine  # pyright: ignore[reportReturnType]  # of engine_class


def _adapter_of(data: TensorDict) -> str:
    name = tu.pop(data, ADAPTER)
    assert name is not None, "a pass that names no adapter would compute with the base"
    return name
