"""Invariances of every mixer and form of credit: to the order of the episodes and of the calls, to a constant moved
from one utility to another, and to turns and calls that were never made."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.dag.credit.joint_advantages import (
    Siblings,
    baseline_inputs,
    center_among_siblings,
    control_variate,
    counterfactual,
    linearized,
)
from recipe.dag.credit.joint_value import JointValueNet, joint_values
from recipe.dag.credit.mixer_batch import CallLayout, MixerBatch
from tests.credit.with_defaults import advantages_of, fit

GRAPH = {"a@0": (), "b@0": ("a@0",), "c@0": (), "a@1": ("a@0", "b@0", "c@0"), "c@1": ("a@0", "b@0", "c@0")}
"""A chain beside a third agent; in the second turn `a` and `c` answer at the same time."""
LAYOUT = CallLayout((0, 1, 2, 0, 2), (0, 0, 0, 1, 1), baseline_inputs(GRAPH, list(GRAPH)))
FORMS, MIXERS = ("control_variate", "counterfactual", "sloped"), ("vdn", "qmix")
SEEDS = st.integers(0, 10_000)
EVERY = [pytest.param(mixer, form, id=f"{mixer}-{form}") for mixer in MIXERS for form in FORMS]


def data_of(seed: int, *, absent: float = 0.2) -> MixerBatch:
    """Two samples, of four and three siblings; some calls, and with the calls of a turn some turns, are not there."""
    draw = torch.Generator().manual_seed(seed)
    count = 7
    message = torch.randint(0, 5, (count, 5), generator=draw)
    message = torch.where(torch.rand(count, 5, generator=draw) < absent, -1, message)
    turns = 1 + (torch.rand(count, generator=draw) < 0.7).long()
    message[turns == 1, 3:] = -1
    rewards = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    rewards[turns == 1, 1] = 0.0
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    return MixerBatch(torch.randn(7, 4, generator=draw), 5 + group, message, rewards, turns, group)


def model_of(mixer: str, seed: int, layout: CallLayout = LAYOUT) -> JointValueNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return JointValueNet(layout, 4, mixer=mixer, hidden=6, mixing_hidden=3, binary=False)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mixer", "form"), EVERY)
@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_order_of_episodes_does_not_matter(mixer, form, seed):
    data, model = data_of(seed), model_of(mixer, seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    moved = replace(
        data, **{name: getattr(data, name)[order] for name in ("question", "message", "rewards", "turns", "group")}
    )
    close(advantages_of(model, moved, form=form), advantages_of(model, data, form=form)[order])
    found, expected = (torch.zeros(7, 2, dtype=torch.float64) for _ in range(2))
    found[moved.points()], expected[data.points()] = (center_among_siblings(d.rewards, d) for d in (moved, data))
    close(found, expected[order])


@pytest.mark.parametrize(("mixer", "form"), EVERY)
@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_order_in_which_calls_are_listed_does_not_matter(mixer, form, seed):
    data, model = data_of(seed), model_of(mixer, seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    names = [list(GRAPH)[i] for i in order]
    roles, turns = (tuple(column[i] for i in order) for column in (LAYOUT.roles, LAYOUT.turns))
    other = model_of(mixer, seed, CallLayout(roles, turns, baseline_inputs(GRAPH, names)))
    if mixer == "qmix":  # where each call has its own weights
        for own, original in zip(other.mixer.weight_in.parameters(), model.mixer.weight_in.parameters(), strict=True):
            own.data.copy_(original.detach().unflatten(0, (5, 3))[order].flatten(0, 1))
    moved = replace(data, message=data.message[:, order])
    expected = advantages_of(model, data, form=form)[:, order]
    close(advantages_of(other, moved, form=form), expected)


@pytest.mark.parametrize("form", FORMS)
@given(seed=SEEDS, constant=st.integers(-80, 80).map(lambda k: k / 8))
@settings(max_examples=15, deadline=None)
def test_a_constant_moved_from_one_agent_to_another_changes_no_credit(form, seed, constant):
    """Holds in every turn in which both are present, and for the partial baselines of a chain."""
    data = data_of(seed, absent=0.0)
    model = model_of("vdn", seed)
    before = advantages_of(model, data, form=form)
    utilities = joint_values(model, data)[1]
    there = (data.message >= 0).unsqueeze(1) & (utilities != 0)
    moved = torch.where(there, utilities + constant * torch.tensor([1.0, 0.0, -1.0, 1.0, -1.0]), 0.0)
    found = advantages_of(model, data, form=form, utilities=moved)
    close(found, before)


@given(seed=SEEDS, constant=st.integers(-80, 80).map(lambda k: k / 8))
@settings(max_examples=15, deadline=None)
def test_side_by_side_no_form_of_credit_changes_at_all(seed, constant):
    draw = torch.Generator().manual_seed(seed)
    utilities = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    moved = utilities + constant * torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    returns, state = torch.randn(4, generator=draw, dtype=torch.float64), torch.ones(1)
    allowed, mask = baseline_inputs({"a": (), "b": (), "c": ()}, "abc"), torch.ones(4, 3, dtype=torch.bool)
    vdn = model_of("vdn", 0).mixer
    for form in (
        lambda u: counterfactual(vdn, Siblings(u, state, mask, allowed)),
        lambda u: linearized(vdn, Siblings(u, state, mask, allowed)),
        lambda u: control_variate(vdn, Siblings(u, state, mask, allowed), returns),
    ):
        torch.testing.assert_close(form(moved), form(utilities))


@pytest.mark.parametrize(("mixer", "form"), EVERY)
@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_calls_and_turns_that_were_never_made_change_nothing(mixer, form, seed):
    """Neither the credit nor what a fit learns of the others changes; `span` is kept, as it scales the turns."""
    data = data_of(seed)
    graph = GRAPH | {"d@0": ("a@0",), "d@2": ("a@1",)}
    longer = CallLayout((*LAYOUT.roles, 2, 2), (*LAYOUT.turns, 0, 2), baseline_inputs(graph, list(graph)))
    padded = replace(
        data,
        message=torch.cat([data.message, torch.full((7, 2), -1)], dim=1),
        rewards=torch.cat([data.rewards, torch.zeros(7, 1, dtype=torch.float64)], dim=1),
    )
    model = model_of(mixer, seed)
    other = model_of(mixer, seed, longer)
    model.span = other.span
    for name, weight in other.named_parameters():
        original = model.get_parameter(name).data
        weight.data[: len(original)] = original
    losses = []
    for net, batch in ((model, data), (other, padded)):
        found = advantages_of(net, batch, form=form)
        losses.append((found[:, :5], fit_loss(net, batch)))
    close(losses[1][0], losses[0][0])
    assert not found[:, 5:].any()
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-4)


def fit_loss(model: JointValueNet, data: MixerBatch) -> float:
    learner = copy.deepcopy(model)
    optimizer = torch.optim.SGD(learner.parameters(), lr=1e-3)
    return fit(learner, optimizer, data, epochs=3, batch_size=4, seed=0)
