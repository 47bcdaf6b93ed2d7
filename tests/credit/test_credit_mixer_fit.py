from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recipe.dag.credit.joint_advantages import (
    Siblings,
    baseline_inputs,
    center_among_siblings,
    control_variate,
    explained_variance,
)
from recipe.dag.credit.joint_value import JointValueNet, joint_values
from recipe.dag.credit.mixer import Target
from recipe.dag.credit.mixer_batch import CallLayout, MixerBatch, concatenate, team_returns
from recipe.dag.credit.mixer_fit import views
from tests.credit.with_defaults import advantages_of, fit

CHAIN = CallLayout((0, 1), (0, 0), baseline_inputs({"a": (), "b": ("a",)}, ["a", "b"]))
PARALLEL = CallLayout((0, 1), (0, 0), baseline_inputs({"a": (), "b": ()}, ["a", "b"]))
TWO_TURNS = {"a@0": (), "b@0": ("a@0",), "a@1": ("a@0", "b@0"), "b@1": ("a@1", "b@0", "a@0")}
TURNS = CallLayout((0, 1, 0, 1), (0, 0, 1, 1), baseline_inputs(TWO_TURNS, list(TWO_TURNS)))


def encoded(message, rewards, *, group=None, turns=None, questions=None, seed=0, size=4, words=6) -> MixerBatch:
    """Vectors of `words` messages and, behind them, as many questions."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    vectors = torch.randn(2 * words, size, generator=torch.Generator().manual_seed(seed))
    group = torch.tensor(group or [0] * len(rewards))
    turns = torch.tensor(turns or [rewards.shape[1]] * len(rewards))
    return MixerBatch(
        vectors, torch.tensor(questions or [words] * len(rewards)), torch.tensor(message), rewards, turns, group
    )


def model_of(layout: CallLayout, *, mixer="vdn", seed=0, size=4) -> JointValueNet:
    torch.manual_seed(seed)
    return JointValueNet(layout, size, mixer=mixer, hidden=16, mixing_hidden=8, binary=False)


def optimizer_of(model: JointValueNet, lr=1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def additive(count: int, *, noise=0.0, seed=0) -> MixerBatch:
    """Two agents say one of six words each; a word earns its number modulo 3."""
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(0, 6, (count, 2), generator=generator)
    earned = (message % 3).sum(1, keepdim=True).double()
    rewards = earned + noise * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return encoded(message.tolist(), rewards.tolist(), group=[i // 8 for i in range(count)])


def test_views_are_all_calls_and_what_each_baseline_may_see():
    data = encoded([[0, 1], [2, -1], [-1, -1]], [[1.0]] * 3)
    point, mask = views(CHAIN, data, *data.points())
    assert list(zip(point.tolist(), mask.int().tolist(), strict=True)) == [
        (0, [1, 0]),  # `a` alone; `b` with its ancestor sees all
        (0, [1, 1]),
        (1, [1, 0]),
        (2, [0, 0]),
    ]
    point, mask = views(TURNS, encoded([[0, 1, 2, 3]], [[1.0, 1.0]]), torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert [(p, m) for p, m in zip(point.tolist(), mask.int().tolist(), strict=True)] == [
        (0, [1, 0, 0, 0]),
        (0, [1, 1, 0, 0]),
        (1, [1, 1, 1, 0]),
        (1, [1, 1, 1, 1]),
    ]


def test_a_turn_is_valued_by_the_calls_up_to_it():
    data, model = encoded([[0, 1, 2, 3], [0, 1, -1, -1]], [[1.0, 2.0], [4.0, 0.0]], turns=[2, 1]), model_of(TURNS)
    values, utilities = joint_values(model, data)
    later = encoded([[0, 1, 5, 4], [0, 1, -1, -1]], [[1.0, 2.0], [4.0, 0.0]], turns=[2, 1])
    changed = joint_values(model, later)[0]
    assert values[0, 0] == changed[0, 0] and values[0, 1] != changed[0, 1]
    assert values[1, 1] == 0 and not utilities[1, 1].any()
    torch.testing.assert_close(values[0, 0], utilities[0, 0, :2].sum())
    torch.testing.assert_close(values[0, 1], utilities[0, 1].sum())
    assert team_returns(data, gamma_turn=0.5).tolist() == [[2.0, 2.0], [4.0, 0.0]]


def test_credit_of_one_turn_is_the_control_variate_of_each_group():
    data = encoded([[0, 1], [2, 3], [4, 5], [1, 1]], [[1.0], [2.0], [4.0], [8.0]], group=[0, 0, 1, 1])
    model = model_of(PARALLEL, mixer="qmix")
    _, utilities = joint_values(model, data)
    state = model.states(model.standardize(data), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    found = advantages_of(model, data)
    made = torch.ones(2, 2, dtype=torch.bool)
    for members in ([0, 1], [2, 3]):
        siblings = Siblings(utilities[members, 0], state[members[0]], made, PARALLEL.baseline_inputs)
        direct = control_variate(model.mixer, siblings, data.rewards[members, 0].float())
        torch.testing.assert_close(found[members], direct.double())


@pytest.mark.parametrize("form", ["control_variate", "counterfactual", "sloped"])
@pytest.mark.parametrize("mixer", ["vdn", "qmix"])
def test_credit_reads_nothing_that_comes_after(form, mixer):
    """Calls before it and at the same time do have an effect."""
    model, rewards = model_of(TURNS, mixer=mixer), [[1.0, 2.0], [4.0, 1.0], [0.0, 3.0]]
    messages = [[0, 1, 2, 3], [1, 2, 3, 4], [5, 0, 1, 2]]
    data = encoded(messages, rewards)
    base = advantages_of(model, data, form=form)
    for call in range(4):
        other = [row.copy() for row in messages]
        other[0][call] = (other[0][call] + 1) % 6
        found = advantages_of(model, encoded(other, rewards), form=form)
        assert torch.equal(found[:, :call], base[:, :call])
        assert not torch.equal(found[:, call:], base[:, call:])
    assert base.any()


def test_calls_that_were_not_made_and_those_without_siblings_get_nothing():
    data = encoded([[0, 1], [2, -1], [-1, -1], [3, 4]], [[1.0], [2.0], [3.0], [4.0]], group=[0, 0, 0, 1])
    found = advantages_of(model_of(PARALLEL), data)
    assert found[0, 0] != 0 and found[1, 0] != 0
    assert found[0, 1] == 0 and not found[1:, 1].any() and not found[2:].any()


def test_what_differs_center_among_siblings():
    data = encoded([[0] * 4] * 3, [[1.0, 1.0], [3.0, 2.0], [7.0, 0.0]], group=[0, 0, 1], turns=[2, 2, 1])
    # turn by turn: 2 less than 3 and as much more; an episode without siblings is centered to 0
    assert center_among_siblings(data.rewards, data).tolist() == [-1.0, -0.5, 1.0, 0.5, 0.0]


def test_concatenated_batches_keep_their_vectors_and_siblings():
    one, other = additive(8), encoded([[0, -1]], [[5.0]], seed=3)
    both = concatenate([one, other])
    assert both.vectors[both.message[8, 0]].equal(other.vectors[0]) and both.message[8, 1] == -1
    assert both.vectors[both.question[8]].equal(other.vectors[6])
    assert both.group.tolist() == [0] * 8 + [1] and both.rewards[8, 0] == 5


@pytest.mark.parametrize("mixer", ["vdn", "qmix"])
def test_a_fit_finds_the_additive_reward_and_the_partial_one_of_a_baseline(mixer):
    data, fresh, model = additive(128), additive(64, seed=5), model_of(CHAIN, mixer=mixer)
    model.fit_text_scale(data)
    first = fit(model, optimizer_of(model), data, epochs=1, batch_size=32, seed=0)
    last = fit(model, optimizer_of(model), data, epochs=120, batch_size=32, seed=1)
    # what is left is the variance of the second message's worth, in the views of the first alone
    assert last < first / 3 and 0.25 < last < 0.5
    values = joint_values(model, fresh)[0]
    assert explained_variance(center_among_siblings(values, fresh), center_among_siblings(fresh.rewards, fresh)) > 0.9
    texts, points = model.standardize(fresh), fresh.points()
    utilities, state = model.mixer_inputs(texts, *points).utilities, model.states(texts, *points)
    alone = model.value(utilities, state, torch.tensor([True, False]).expand(64, -1)).detach()
    expected = (fresh.message[:, 0] % 3).float() + 1.0
    assert (alone - expected).abs().mean() < 0.35


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    def weights(seed):
        model = model_of(PARALLEL)
        fit(model, optimizer_of(model), additive(32), epochs=2, batch_size=8, seed=seed)
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_targets_bootstrap_from_the_slow_copy_that_follows():
    rewards = [[0.0, 1.0], [0.0, 1.0]]
    data = encoded([[0, 1, 2, 3], [1, 2, 3, 4]], rewards)

    def first_turn_after(lam, bias):
        model = model_of(TURNS)
        target = Target(model)
        with torch.no_grad():
            target.module.utility.layers[-1].bias.add_(bias)
        before = target.module.utility.layers[0].weight.clone()
        fit(model, optimizer_of(model), data, epochs=60, batch_size=8, seed=0, lam=lam, target=target, tau=0.001)
        assert not torch.equal(before, target.module.utility.layers[0].weight)
        return joint_values(model, data)[0][:, 0].mean().item()

    assert first_turn_after(0.0, 10.0) > 10  # four calls of the next turn, each 10 too dear
    assert abs(first_turn_after(1.0, 10.0) - 1.0) < 0.3


def test_a_loss_that_is_not_finite_is_an_error():
    data = encoded([[0, 1]], [[float("inf")]])
    model = model_of(PARALLEL)
    with pytest.raises(ValueError, match="the loss of the joint value is inf"):
        fit(model, optimizer_of(model), data, epochs=1, batch_size=8, seed=0)


def test_the_scale_of_the_rewards_does_not_matter():
    def fitted(scale, shift):
        data, model = additive(64), model_of(PARALLEL, mixer="qmix")
        data = replace(data, rewards=scale * data.rewards + shift)
        model.fit_return_scale(data, team_returns(data, gamma_turn=1.0))
        fit(model, optimizer_of(model), data, epochs=5, batch_size=16, seed=0)
        return (joint_values(model, data)[0] - shift) / scale, data, model

    values, data, model = fitted(1.0, 0.0)
    torch.testing.assert_close(fitted(100.0, 50.0)[0], values, atol=1e-2, rtol=1e-2)
    assert model.return_mean == data.rewards.mean() and model.return_std == pytest.approx(
        data.rewards.std(correction=0)
    )


def test_an_epoch_takes_no_more_steps_than_asked_for_and_batches_no_smaller_than_given():
    taken = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            taken[-1] += 1

    for batch_size, steps in ((8, 100), (8, 5), (8, 1), (64, 5)):
        model = model_of(PARALLEL)
        taken.append(0)
        fit(
            model,
            Counting(model.parameters(), lr=0.1),
            additive(64),
            epochs=2,
            batch_size=batch_size,
            steps=steps,
            seed=0,
        )
    assert taken == [16, 10, 2, 2]


def test_views_of_more_calls_than_a_number_has_bits():
    count = 130
    layout = CallLayout((0,) * count, (0,) * count, ~torch.eye(count, dtype=torch.bool))
    data = encoded([[0] * count, [0] * 70 + [-1] * 60], [[1.0], [1.0]])
    point, mask = views(layout, data, *data.points())
    assert point.tolist() == [0, 1] and mask.sum(1).tolist() == [130, 70]
    alone = CallLayout(layout.roles, layout.turns, torch.zeros(count, count, dtype=torch.bool))
    point, mask = views(alone, data, *data.points())
    assert point.bincount().tolist() == [131, 71] and (mask.sum(1) == 1).sum() == 200
