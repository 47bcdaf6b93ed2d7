from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.credit.with_defaults import importance_weights

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "mask")


def weights(ratios, *, mask=None, call_ends=None, **options):
    """Return weights and metrics of rows whose tokens have these ratios."""
    trainer = [torch.tensor(row, dtype=torch.float64).log() - 1.0 for row in ratios]
    server = [torch.full((len(row),), -1.0) for row in ratios]
    mask = mask or [[1] * len(row) for row in ratios]
    call_ends = call_ends or [(len(row),) for row in ratios]
    found, metrics = importance_weights(trainer, server, list(map(torch.tensor, mask)), call_ends, **options)
    return [row.tolist() for row in found], metrics


def test_a_ratio_above_the_cap_is_truncated_or_masked():
    ratios = [[0.25, 1.0, 1.5, 4.0]]
    assert weights(ratios)[0] == [pytest.approx([0.25, 1.0, 1.5, 2.0])]
    assert weights(ratios, mode="mask")[0] == [pytest.approx([0.0, 1.0, 1.5, 0.0])]
    assert weights(ratios, mode="mask", cap=5.0)[0] == [pytest.approx([0.25, 1.0, 1.5, 4.0])]


def test_a_sequence_has_the_product_of_its_sampled_tokens_and_merged_calls_have_their_own():
    ratios, mask = [[1.5, 9.0, 0.5, 1.2]], [[1, 0, 1, 1]]
    assert weights(ratios, mask=mask, level="sequence")[0] == [pytest.approx([0.9, 0.0, 0.9, 0.9])]
    merged = weights(ratios, mask=mask, call_ends=[(1, 4)], level="sequence")[0]
    assert merged == [pytest.approx([1.5, 0.0, 0.6, 0.6])]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_where_server_and_trainer_agree_every_weight_is_one(level, mode):
    found, metrics = weights([[1.0] * 5, [1.0]], level=level, mode=mode)
    assert found == [[1.0] * 5, [1.0]]
    assert metrics == {f"importance/{key}": 1.0 for key in ("mean", "min", "max", "ess")} | {"importance/capped": 0.0}


def test_metrics_count_tokens_or_calls():
    ratios, mask = [[4.0, 1.0, 7.0], [1.0, 1.0, 1.0]], [[1, 1, 0], [1, 1, 1]]
    _, metrics = weights(ratios, mask=mask)
    assert metrics == pytest.approx(
        {
            "importance/mean": 6 / 5,
            "importance/min": 1.0,
            "importance/max": 4.0,
            "importance/capped": 1 / 5,
            "importance/ess": 36 / (5 * 8),
        }
    )
    _, metrics = weights(ratios, mask=mask, level="sequence", mode="mask")
    assert (metrics["importance/capped"], metrics["importance/mean"], metrics["importance/ess"]) == (0.5, 0.5, 0.5)
    _, metrics = weights([[9.0]], mode="mask")
    assert (metrics["importance/capped"], metrics["importance/ess"]) == (1.0, 0.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_weights_are_those_of_verl(level, mode, data):
    verl = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    width = data.draw(st.integers(1, 6))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    difference = torch.randn(3, width, generator=draw)
    difference[0] = 0.0  # verl's metrics divide by the mean weight
    mask = torch.randint(0, 2, (3, width), generator=draw)
    mask[:, 0] = 1
    threshold = "0.5_2.0" if mode == "mask" else 2.0
    expected, metrics = verl.compute_rollout_correction_weights(difference, mask, level, threshold)
    found, own = importance_weights(
        list(difference), [torch.zeros(width)] * 3, list(mask), [(width,)] * 3, cap=2.0, level=level, mode=mode
    )
    torch.testing.assert_close(torch.stack(found), expected * mask)
    if level == "token":
        assert own["importance/ess"] == pytest.approx(metrics["rollout_is_eff_sample_size"], abs=1e-5)


def test_weighted_samples_of_the_server_have_the_trainers_expectation():
    server, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    value = torch.tensor([1.0, -2.0, 5.0])
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    (weight,), _ = importance_weights(
        [trainer.log()[tokens]], [server.log()[tokens]], [torch.ones(10)], [(10,)], cap=2.0
    )
    assert (weight * value[tokens]).mean().item() == pytest.approx((trainer * value).sum().item())


def test_what_is_masked_may_hold_anything_and_what_is_sampled_must_be_finite():
    log_probs = [torch.tensor([-1.0, math.nan])]
    found, _ = importance_weights(log_probs, log_probs, [torch.tensor([1, 0])], [(2,)])
    assert found[0].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="row 0: a log-prob is not finite"):
        importance_weights(log_probs, log_probs, [torch.tensor([1, 1])], [(2,)])


def test_a_ratio_beyond_all_bounds_stays_finite():
    found, metrics = importance_weights([torch.tensor([900.0])], [torch.zeros(1)], [torch.ones(1)], [(1,)])
    assert found[0].tolist() == [2.0] and math.isfinite(metrics["importance/max"])


@pytest.mark.parametrize(
    ("options", "message"), [({"level": "turn"}, "level: 'turn'"), ({"mode": "clip"}, "mode"), ({"cap": 1.0}, "cap")]
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        weights([[1.0]], **options)


def test_a_geometric_ratio_is_the_mean_of_a_calls_sampled_tokens():
    ratios, mask = [[4.0, 9.0, 1.0, 0.5]], [[1, 0, 1, 1]]
    mean = 2.0 ** (1 / 3)
    found, metrics = weights(ratios, mask=mask, level="geometric")
    assert found == [pytest.approx([mean, 0.0, mean, mean])] and metrics["importance/max"] == pytest.approx(mean)
    merged = weights(ratios, mask=mask, call_ends=[(2, 4)], level="geometric", cap=1.5)[0]
    assert merged == [pytest.approx([1.5, 0.0, math.sqrt(0.5), math.sqrt(0.5)])]
    assert weights(ratios, mask=[[0, 0, 0, 0]], level="geometric")[0] == [[0.0] * 4]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_token_on_which_both_disagree_vetoes_its_call_alone(level, mode):
    ratios, mask = [[1.0, 1e-5, 1.0, 1.0], [1.0, 1e-5, 1.0, 1.0]], [[1, 1, 1, 1], [1, 0, 1, 1]]
    found, metrics = weights(ratios, mask=mask, call_ends=[(2, 4), (4,)], level=level, mode=mode, veto=1e-4)
    assert found == [pytest.approx([0.0, 0.0, 1.0, 1.0]), pytest.approx([1.0, 0.0, 1.0, 1.0])]
    assert metrics["importance/vetoed"] == pytest.approx(1 / 3)
    more = weights([*ratios, [1e-5]], mask=[*mask, [0]], call_ends=[(2, 4), (4,), (1,)], level=level, veto=1e-4)[1]
    assert more["importance/vetoed"] == pytest.approx(1 / 3)  # of the calls with a sampled token
    assert "importance/vetoed" not in weights(ratios, mask=mask, level=level, mode=mode)[1]
