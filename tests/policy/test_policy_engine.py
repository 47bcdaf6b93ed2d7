"""Packed rows, our attention and our head compute what verl's padded engine computes, on one rank and on two."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from recipe.dag.policy import engine
from recipe.dag.policy.engine import sampled_positions
from recipe.dag.policy.value_model import ValueEngine
from tests.policy.ranks import run_ranks
from tests.policy.spmd_step import cases

EXPECTED = {"padded", "untied_padded"}
"""Engines that all are compared with, on one rank."""
SCRIPT = Path(__file__).with_name("spmd_step.py")
UNTIED = ("untied", "untied_kept", "untied_checkpointed", "untied_kept_checkpointed")


@pytest.fixture(scope="module")
def untied_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with output embeddings of its own, as large models have them."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def steps(tiny_model, untied_model, tmp_path_factory, zygote) -> dict[tuple[int, str, str], dict]:
    """(ranks, engine, loss) -> what a training step computed there."""
    found = {}
    for world in (1, 2):
        out = tmp_path_factory.mktemp(f"ranks{world}")
        run_ranks(zygote.python, SCRIPT, world, out, str(tiny_model), str(untied_model), str(out))
        for path in out.glob("*.pt"):
            engine, _, loss = path.stem.rpartition("_")
            found[world, engine, loss] = torch.load(path)
    return found


def test_each_engine_is_the_one_that_it_is_called(steps):
    kinds = {name: (step["attention"], bool(step["fused"])) for (_, name, _), step in steps.items()}
    padded = dict.fromkeys(("padded", "untied_padded"), ("sdpa", False))
    fused = dict.fromkeys(("packed", *UNTIED), ("varlen", True))
    assert kinds == padded | fused | dict.fromkeys(("packed_logits", "shared"), ("varlen", False))


@pytest.mark.parametrize(
    ("ranks", "name", "loss"),
    [(ranks, *case) for ranks in (1, 2) for case in cases(ranks) if ranks > 1 or case[0] not in EXPECTED],
)
@pytest.mark.parametrize(
    "what", ["old_log_probs", "ref_log_prob", "entropy", "values", "canary", "gradient", "weights", "critic"]
)
def test_a_step_is_that_of_padded_rows_on_one_rank(steps, ranks, name, loss, what):
    padded = "untied_padded" if name.startswith("untied") else "padded"
    if loss == "spin" and what in ("values", "critic"):
        pytest.skip("it has no critic")
    expected, found = steps[1, padded, loss][what], steps[ranks, name, loss][what]
    assert expected.abs().max() > 1e-3
    if what == "gradient":  # of a norm that depends on the loss
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    elif what in ("weights", "critic"):  # Adam's first step is lr * sign(gradient): compare where that is no noise
        assert float((found - expected).abs().median()) < 1e-6
        assert float((found - expected).norm() / expected.norm()) < 1e-3
    else:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["untied_padded", *UNTIED])
@pytest.mark.parametrize("ranks", [1, 2])
def test_output_embeddings_are_gathered_no_longer_than_fsdp_gathers_a_layer(steps, ranks, name):
    *after_forward, after_backward = steps[ranks, name, "vanilla"]["held"]
    assert len(after_forward) >= 4, "old log-probs and the update have several micro-batches each"
    whole = 96 * 32 * 4  # the vocabulary and width of the model, in fp32
    assert set(after_forward) == {whole if "kept" in name else 0} and after_backward == 0


def test_only_tokens_that_the_policy_sampled_are_scored():
    def nested(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    ids = nested([10, 11, 12, 13, 14], [20, 21], [30, 31, 32])
    positions = sampled_positions(ids, nested([1, 0, 1], [1], [1, 1]))
    assert positions.tolist() == [1, 3, 5, 7, 8]
    assert ids.values()[positions + 1].tolist() == [12, 14, 21, 31, 32]
    assert sampled_positions(ids, nested([0, 0, 0], [0], [0, 0])).tolist() == [0]


def test_what_is_offloaded_leaves_the_gpu_after_the_optimizers_state_was_moved(monkeypatch):
    done = []

    class Verls:
        def to(self, device, model, optimizer, grad):
            done.append((device, model, optimizer))

    class Engine(engine.FullOffload, Verls):
        pass

    gpu = SimpleNamespace(synchronize=lambda: done.append("synchronize"), empty_cache=lambda: done.append("empty"))
    monkeypatch.setattr(engine, "get_torch_device", lambda: gpu)
    monkeypatch.setattr(engine, "get_device_name", lambda: "cuda")
    Engine().to("cuda")
    Engine().to("cpu", model=True, optimizer=False)
    assert done == [("cuda", True, True), ("cpu", True, False)], "verl's own has emptied it after the weights"
    done.clear()
    Engine().to("cpu")
    assert done == [("cpu", True, True), "synchronize", "empty"]
    assert issubclass(engine.PolicyEngine, engine.FullOffload) and issubclass(ValueEngine, engine.FullOffload)


class Deferring:
    """Reduces gradients as verl does."""

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch):
        self.module.set_requires_gradient_sync(is_last_micro_batch)
        yield


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, hidden):
        return self.first(hidden)


def test_gradients_are_reduced_once_beside_a_layer_that_no_pass_calls():
    if is_mine := not dist.is_initialized():  # else by the fixture `engine`
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Layers()
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (model.first, model.unused, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=half)
        tested = type("Tested", (engine.GatheredWeights, Deferring), {})()
        tested.module, tested.engine_config = model, SimpleNamespace(reshard_after_forward=True)
        for last in (False, True):
            with tested._gradient_sync_context(is_last_micro_batch=last):
                model(torch.ones(1, 2)).sum().backward()
        assert model.first.bias.grad.to_local().tolist() == [2.0, 2.0] and model.unused.bias.grad is None
    finally:
        if is_mine:
            dist.destroy_process_group()
