"""What training takes, against peaks measured on one H100 (torch.cuda.max_memory_allocated)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipe.dag.workflow.trainer_memory import (
    ADAM,
    ADAM_8BIT,
    Head,
    TrainerOptions,
    activation_bytes,
    head_bytes,
    host_bytes,
    pinned_growth,
    resident_bytes,
    update_phases,
)
from tests.workflow.shapes import qwen

GB = 1e9


@pytest.fixture
def three(tmp_path):
    """Qwen2.5-3B with its vocabulary of 151,936 tokens."""
    return qwen("3b", tmp_path)


@pytest.mark.parametrize(("head", "measured"), [(Head.PADDED, 22.1), (Head.PACKED, 18.7), (Head.FUSED, 15.8)])
def test_activations_and_head_are_within_15_percent_of_the_measured_passes(head, measured, three):
    """bf16 weights and gradients without an optimizer, micro-batches of 8,192 tokens."""
    estimate = (2 + 2) * three.parameters + activation_bytes(three, TrainerOptions(8192, head=head))
    assert estimate / GB == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("shape", "measured"), [("0.5b", 10.3), ("1.5b", 31.0), ("3b", 61.8)])
def test_the_peak_of_an_fsdp_update_is_within_15_percent_of_the_measured_one(shape, measured, tmp_path):
    """examples/bench_training.py: fp32 master weights and Adam on the card, 16,384 tokens a micro-batch, fused head."""
    peak = max(phase.used for phase in update_phases(qwen(shape, tmp_path), 1, TrainerOptions(16384)))
    assert peak / GB == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({"tokens": 16384, "reshard": False}, 61.8),
        ({"tokens": 16384, "reshard": False, "mlp_only": 36}, 70.2),
        ({"tokens": 16384, "reshard": False, "mlp_only": 1000}, 70.2),
        ({"tokens": 16384, "reshard": False, "mlp_only": 1000, "nothing": 3}, 73.6),
        ({"tokens": 8192, "checkpointing": False}, 79.2),
        ({"tokens": 6144, "checkpointing": False}, 70.9),
        ({"tokens": 4096, "checkpointing": False}, 65.3),
        ({"tokens": 4096, "checkpointing": False, "liger": False}, 70.9),
    ],
    ids=str,
)
def test_the_peak_with_less_recompute_is_within_5_percent_of_the_measured_one(options, measured, three):
    peak = max(phase.used for phase in update_phases(three, 1, TrainerOptions(**{"liger": True, **options})))
    assert peak / GB == pytest.approx(measured, rel=0.05)


def test_the_fused_head_takes_far_less_than_logits_and_grows_with_the_vocabulary_no_more(three):
    assert head_bytes(three, 16384, Head.FUSED) < 0.1 * head_bytes(three, 16384, Head.PACKED)
    assert head_bytes(three, 16384, Head.CHUNKED) == head_bytes(three, 4096, Head.CHUNKED)
    assert head_bytes(three, 16384, Head.LOGITS) > head_bytes(three, 16384, Head.PADDED)
    assert head_bytes(three, 16384, Head.PADDED) == 16384 * 151936 * 2 * 3


def test_a_width_that_the_kernel_does_not_take_is_computed_in_chunks(three):
    odd = replace(three, hidden=three.hidden + 64)
    assert head_bytes(odd, 8192, Head.FUSED) == head_bytes(three, 8192, Head.CHUNKED)


def test_without_checkpointing_every_layer_keeps_its_activations(three):
    plain = activation_bytes(three, TrainerOptions(8192, checkpointing=False))
    assert plain > 5 * activation_bytes(three, TrainerOptions(8192))


def test_adam_in_8_bits_takes_18_gb_less_for_3b(three):
    plain, small = (update_phases(three, 1, TrainerOptions(8192, moments=moments)) for moments in (ADAM, ADAM_8BIT))
    assert (plain[0].used - small[0].used) / GB == pytest.approx(18.4, abs=0.1)
    assert small[1].used < (4 + 4 + 2.1) * three.parameters + 4 * three.vocabulary * three.hidden * 1.1


def test_states_are_sharded_over_the_gpus_and_activations_are_not(three):
    one, four = (update_phases(three, gpus, TrainerOptions(16384))[0] for gpus in (1, 4))
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=1e-6) and four.activations == one.activations


def test_a_critic_has_no_logits(three):
    backward, step = update_phases(three, 1, TrainerOptions(8192, head=Head.PADDED), critic=True)
    assert backward.activations < head_bytes(three, 8192, Head.PADDED)
    assert step.weights == 4 * three.value_parameters


@pytest.mark.parametrize(
    ("options", "resident", "pinned", "pageable"),
    [
        ({}, 12, 0, 0),
        ({"param_offload": True}, 8, 4, 0),
        ({"optimizer_offload": True}, 4, 8, 0),
        ({"param_offload": True, "optimizer_offload": True}, 0, 12, 0),
        ({"offload_policy": True}, 0, 8, 8),
        ({"moments": 2}, 6, 0, 0),
        ({"moments": 2, "optimizer_offload": True}, 4, 2, 0),
    ],
    ids=str,
)
def test_what_leaves_the_gpu_is_in_host_memory(options, resident, pinned, pageable, three):
    trainer = TrainerOptions(4096, **options)
    host = int(pinned * 100 * pinned_growth(three, 1)) + pageable * 100
    assert (sum(resident_bytes(100, 1, trainer)), host_bytes(three, 100, 1, trainer)) == (resident * 100, host)


def test_host_memory_is_within_3_percent_of_the_measured_processes(three):
    """On one H100: the shared memory of a trainer whose weights and Adam are offloaded, and, with FSDP2's own
    offloading, all memory of the trainer (3.3 GB of it is not the model's)."""
    moved = TrainerOptions(16384, param_offload=True, optimizer_offload=True)
    assert host_bytes(three, three.parameters, 1, moved) / GB == pytest.approx(54.05, rel=0.03)
    kept = TrainerOptions(16384, offload_policy=True)
    assert host_bytes(three, three.parameters, 1, kept) / GB == pytest.approx(59.9 * 1.074 - 3.3, rel=0.03)


def test_pinned_tensors_are_rounded_up_to_powers_of_two(three):
    even = replace(three, vocabulary=2**17, mlp_width=8192, key_value_width=256)
    assert pinned_growth(even, 1) == pinned_growth(even, 8) == 1
    assert 1.4 < pinned_growth(three, 1) < 1.5


def test_fsdps_own_offloading_keeps_one_layers_weights_and_no_optimizer(three):
    (backward,) = update_phases(three, 1, TrainerOptions(4096, offload_policy=True))
    assert backward.name == "backward" and backward.optimizer == 0 and backward.used < 5 * GB


def test_a_single_gpu_holds_the_base_of_adapters_once(three):
    one, two = (update_phases(three, gpus, TrainerOptions(4096, adapters=1000, reshard=False))[0] for gpus in (1, 2))
    assert one.weights == 2 * three.parameters + (4 + 2) * 1000
    assert two.weights == one.weights // 2 - 1000 + 2 * three.parameters
