"""An SGLang server gets weights in one piece of memory. Here without SGLang."""

from __future__ import annotations

import asyncio
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

OURS, STOCK = "recipe.dag.policy.sglang", "verl.workers.rollout.sglang_rollout.sglang_rollout"
WEIGHTS = {
    "embed": torch.randn(3, 5).bfloat16(),
    "norm": torch.randn(3),
    "proj": torch.randn(5, 1).bfloat16(),
}


class Bucket:
    """SGLang's class, as far as it is used here."""

    def __init__(self, named_tensors):
        self.flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])
        self.metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in named_tensors]

    def get_flattened_tensor(self):
        return self.flat

    def get_metadata(self):
        return self.metadata


class Server:
    """verl's client of a server whose rank `rank` loads its part of each request."""

    def __init__(self, rank: int):
        self.rank, self.requests, self.weights = rank, 0, {}

    async def update_weights_from_tensor(self, request):
        assert request.load_format == "flattened_bucket" and not request.flush_cache
        part = pickle.loads(request.serialized_named_tensors[self.rank])
        start, self.requests = 0, self.requests + 1
        for name, dtype, shape in part["metadata"]:
            end = start + shape.numel() * dtype.itemsize
            self.weights[name] = part["flattened_tensor"][start:end].view(dtype).reshape(shape)
            start = end


@pytest.fixture
def stock(monkeypatch):
    """verl's module whose function the import of this project's replaces."""
    parents = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.weight_sync")
    modules = {name: ModuleType(name) for name in parents}

    def module(name: str, **members) -> ModuleType:
        modules[name] = ModuleType(name)
        vars(modules[name]).update(members)
        return modules[name]

    found = module(STOCK, ServerAdapter=object, sgl_update_weights=None)
    module("sglang.srt.managers.io_struct", UpdateWeightsFromTensorReqInput=SimpleNamespace)
    module("sglang.srt.utils", MultiprocessingSerializer=SimpleNamespace(serialize=pickle.dumps))
    module("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    module("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorBucket=Bucket)
    for name, each in modules.items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(STOCK, found, raising=False)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    import recipe.dag.policy.sglang

    monkeypatch.setitem(sys.modules, OURS, sys.modules[OURS])  # removed with the rest
    monkeypatch.delattr(recipe.dag.policy, "sglang")
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_is_one_piece_of_memory_and_each_rank_gets_its_own(stock, monkeypatch, rank):
    others = {name: -WEIGHTS[name] for name in ("norm", "embed", "proj")}
    group, server = object(), Server(rank)

    def gather_object(part, parts, group, group_dst):
        """The other rank sends its own bucket."""
        assert group_dst == 0 and group is mesh.get_group()
        if parts is not None:
            bucket = Bucket(list(others.items()))
            parts[:] = [part, pickle.dumps({"flattened_tensor": bucket.flat, "metadata": bucket.metadata})]

    monkeypatch.setattr("torch.distributed.gather_object", gather_object)
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: group)
    send = stock.sgl_update_weights
    asyncio.run(send(server, list(WEIGHTS.items()), device_mesh_key="infer_tp", device_mesh={"infer_tp": mesh}))
    sign = 1 if rank == 0 else -1
    assert server.requests == 1 and list(server.weights) == ["norm", "embed", "proj"]
    for name, weight in server.weights.items():
        torch.testing.assert_close(weight, sign * WEIGHTS[name], rtol=0, atol=0)

    mesh.get_local_rank = lambda: 1
    asyncio.run(send(None, list(WEIGHTS.items()), device_mesh_key="infer_tp", device_mesh={"infer_tp": mesh}))
