"""The trainer's side of SGLang servers: several policies in one run, and weights in few pieces.

Invariant: verl names a policy's server `sglang_server_{rank}_{node}_{suffix}`, but its trainer-side adapter looks it up
without the suffix; this adapter adds it. verl's adapter sends a bucket of weights as one handle of GPU memory for each
weight, which both processes open, wait for and close; here the weights of a bucket lie in one piece of memory. Nothing
else differs from verl's adapter.
"""

from __future__ import annotations

from typing import Any

import ray
import torch.distributed as dist
import verl.workers.rollout.sglang_rollout.sglang_rollout as stock
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


async def send_weights(
    engine: Any, params_batch: list[tuple[str, Tensor]], device_mesh_key: str, device_mesh: DeviceMesh
) -> None:
    """Load these weights into the server behind `engine`, whose ranks have GPUs of `device_mesh`[`device_mesh_key`].

    As SGLang's `update_weights`, which verl calls: every rank of the mesh calls it with the same names; the first one
    sends, and returns when the server has copied the weights. torch keeps a rank's memory until the server lets go of
    it.
    """
    mesh = device_mesh[device_mesh_key]
    monkey_patch_torch_reductions()  # handles name a GPU by its UUID: the server may see other GPUs
    # the largest numbers first: so each weight starts at a multiple of its number's size
    weights = sorted(params_batch, key=lambda each: -each[1].element_size())
    bucket = FlattenedTensorBucket(named_tensors=[(name, weight.detach()) for name, weight in weights])
    part = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    parts = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
    dist.gather_object(MultiprocessingSerializer.serialize(part), parts, group=mesh.get_group(), group_dst=0)
    if parts is not None:
        # verl's adapter empties the server's cache after the last bucket
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=parts, load_format="flattened_bucket", flush_cache=False
        )
        await engine.update_weights_from_tensor(request)


stock.sgl_update_weights = send_weights  # pyright: ignore[reportPrivateImportUsage]


class _SuffixedRay:
    """The module `ray`, except that `get_actor` appends the policy's suffix."""

    def __init__(self, suffix: str):
        self._suffix = suffix

    def __getattr__(self, name: str):
        return getattr(ray, name)

    def get_actor(self, name: str, *args, **kwargs):
        return ray.get_actor(name + self._suffix, *args, **kwargs)


class PolicyServerAdapter(stock.ServerAdapter):
    """verl's adapter, connected to the server of the worker's policy."""

    async def _init_server_adapter(self) -> None:
        # safe, because a worker process serves one policy: nothing else looks up an actor through this module meanwhile
        stock.ray = _SuffixedRay(f"_{self.config.custom['policy']}")  # pyright: ignore[reportPrivateImportUsage]
        try:
            await super()._init_server_adapter()
        finally:
            stock.ray = ray  # pyright: ignore[reportPrivateImportUsage]
