"""Tokens per second, the share of a device's peak, and the memory that verl's workers report."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config
from verl.utils.flops_counter import FlopsCounter, get_device_flops

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.policy.placement import Pool
from recipe.dag.train import kernels, throughput
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.step import TrainingStep
from recipe.dag.train.throughput import ModelFlops, Pass, find_flops, measured, throughput_metrics
from recipe.dag.types.row import Row
from tests.rows import build_row

QWEN = Qwen2Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)


def row(prompt: int, response: int) -> Row:
    return build_row(1.0, prompt=[3] * prompt, mask=[1] * response)


def test_a_pass_counts_prompts_and_responses_once_an_epoch():
    passes: list[Pass] = []
    with measured(passes, "update", [row(5, 3), row(2, 1)], epochs=2):
        pass
    assert passes[0].kind == "update" and sum(passes[0].lengths) == 2 * (8 + 3) and passes[0].seconds >= 0
    assert passes[0].sampled == 2 * (3 + 1)


def test_a_pass_that_fails_is_not_counted():
    passes: list[Pass] = []
    with pytest.raises(RuntimeError), measured(passes, "update", [row(5, 3)]):
        raise RuntimeError
    assert passes == []


def test_verls_utilization_is_that_of_its_counter_and_a_forward_pass_takes_a_third():
    flops, lengths, seconds = ModelFlops(QWEN, None, 1e12), (100, 300), 0.5
    tera_per_s, _ = FlopsCounter(QWEN).estimate_flops(list(lengths), seconds)
    passes = [Pass(kind, lengths, seconds) for kind in ("update", "log_prob")]
    metrics = throughput_metrics(passes, flops)
    assert metrics["mfu_verl"] == pytest.approx(tera_per_s) == pytest.approx(3 * metrics["log_prob_mfu_verl"])


def test_needed_are_the_layers_for_every_token_and_the_output_embeddings_for_sampled_ones():
    width, mlp, layers, vocabulary = 64, 128, 2, 1000
    lengths, sampled = (100, 300), 50
    weights = layers * (3 * width * mlp + 4 * width * width)
    attention = layers * width * sum(length**2 for length in lengths)  # causal: half of all pairs
    needed = 6 * (weights * sum(lengths) + attention + vocabulary * width * sampled)
    update = Pass("update", lengths, 1.0, sampled)
    assert ModelFlops(QWEN, None, 1e12).needed(update) == pytest.approx(needed)
    on_frozen = ModelFlops(QWEN, None, 1e12, adapter=True)
    fewer = 2 * (weights * sum(lengths) + vocabulary * width * sampled)
    assert on_frozen.needed(update) == pytest.approx(needed - fewer), "no gradients of weights"
    assert on_frozen.needed(Pass("log_prob", lengths, 1.0, sampled)) == pytest.approx(needed), "of which a third counts"


@pytest.mark.parametrize(("tied", "embeddings"), [(True, 6400), (False, 12800)])
def test_other_families_take_six_flops_a_parameter_and_token_without_embeddings(tied, embeddings):
    other = SimpleNamespace(model_type="of_tomorrow", vocab_size=100, hidden_size=64, tie_word_embeddings=tied)
    other.get_text_config = lambda: other
    done = Pass("update", (50, 50), 2.0, 10)
    known = ModelFlops(other, 20_000, 1e9)
    assert known.of_update(done.lengths) == 6 * 20_000 * 100
    assert known.needed(done) == 6 * ((20_000 - embeddings) * 100 + 6400 * 10)
    assert ModelFlops(other, None, 1e9).needed(done) is None
    assert "mfu" not in throughput_metrics([done], ModelFlops(other, None, 1e9))


def test_passes_of_one_kind_are_counted_together_and_unknown_shares_are_absent():
    passes = [Pass("log_prob", (30,), 1.0), Pass("log_prob", (10,), 1.0), Pass("update", (40,), 4.0)]
    assert throughput_metrics(passes, None) == {"log_prob_tokens_per_s": 20.0, "update_tokens_per_s": 10.0}
    assert set(throughput_metrics(passes, ModelFlops(QWEN, None, 1e12))) == {
        *("log_prob_tokens_per_s", "update_tokens_per_s", "log_prob_mfu", "mfu", "log_prob_mfu_verl", "mfu_verl")
    }


def fake_policy(peak_of: dict) -> SimpleNamespace:
    workers = SimpleNamespace(world_size=2, execute_func_rank_zero=lambda function, unit: function(unit, **peak_of))
    model = SimpleNamespace(path="m", trust_remote_code=False)
    return SimpleNamespace(workers=workers, config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(model=model)))


def test_the_peak_is_that_of_all_devices_by_verls_table(monkeypatch):
    monkeypatch.setattr(throughput, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(throughput.AutoConfig, "from_pretrained", lambda *_args, **_keys: QWEN)
    assert find_flops(fake_policy({"device_name": "NVIDIA H100 80GB HBM3"})).peak == pytest.approx(2 * 989e12)
    assert find_flops(fake_policy({"device_name": "of tomorrow"})) is None
    assert get_device_flops("B", device_name="NVIDIA H100 80GB HBM3") == 989e12


def test_a_worker_looks_up_its_own_device(engine):
    assert engine.worker.execute_func_rank_zero(get_device_flops, "B") == get_device_flops("B", device_name="CPU")


def test_a_cpu_has_no_peak():
    assert find_flops(fake_policy({"device_name": "CPU"})) is None


class FakeWorkers:
    """Answers an update as verl's worker does; memory in GiB."""

    def __init__(self, allocated: float):
        self.metrics = {
            "actor/pg_loss": [0.5],
            "mfu": [0.3],
            "perf/max_memory_allocated_gb": [allocated],
            "perf/cpu_memory_used_gb": [4.0],
        }

    def update_actor(self, data):
        from verl.utils import tensordict_utils as tu

        return tu.get_tensordict({}, non_tensor_dict={"metrics": dict(self.metrics)})


@pytest.mark.parametrize("allocated", [0.0, 61.8])
def test_a_step_reports_rates_memory_and_tokens_of_its_rows(monkeypatch, two_policies, allocated):
    workflow = two_policies.model_copy(update={"algorithm": make_algorithm(epochs=2)})
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=1))
    )
    policy = SimpleNamespace(
        name="a",
        config=config,
        data_parallel_size=1,
        workers=FakeWorkers(allocated),
        pool=Pool(None, 1),
        processes=None,
        tokenizer=SimpleNamespace(pad_token_id=0),
    )

    def old_log_probs(policy, batch: PolicyBatch) -> None:
        with measured(batch.passes, "log_prob", batch.rows):
            batch.columns["old_log_probs"] = [kernels.torch.zeros(len(r.response_ids)) for r in batch.rows]

    monkeypatch.setattr(kernels, "old_log_probs", old_log_probs)
    rows = [row(5, 3), row(2, 1)]
    for r in rows:
        r.policy = "a"
    step = TrainingStep(workflow, {"a": policy}, rows, flops={"a": ModelFlops(QWEN, None, 1e12)}, seed=0)
    asyncio.run(step.run())
    metrics = step.metrics()
    assert metrics["rows/tokens_computed"] == 11 and metrics["rows/tokens_trained"] == 4
    rates = {
        "log_prob_tokens_per_s",
        "update_tokens_per_s",
        "mfu",
        "log_prob_mfu",
        "mfu_verl",
        "log_prob_mfu_verl",
        "cpu_memory_used_gb",
    }
    memory = {"max_memory_allocated_gb"} if allocated else set()
    assert {key for key in metrics if key.startswith("perf/")} == {f"perf/a/{key}" for key in rates | memory}
    assert sum(step.batches["a"].passes[-1].lengths) == 2 * 11
    assert metrics["policy/a/pg_loss"] == 0.5 and "policy/a/mfu" not in metrics
