from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.episode.rows import rows_of
from recipe.dag.train import trainer
from recipe.dag.train.sampling import Sampler
from recipe.dag.train.selection import IdleSteps, collect, informative_uids, select_rows
from recipe.dag.types.record import Call, Episode
from recipe.dag.workflow.schema import Workflow
from tests.rows import of_calls


def workflow(max_batches: int | None = None, estimator: str = "grpo") -> Workflow:
    algorithm = {"estimator": estimator, "drop_zero_variance": True}
    if max_batches is not None:
        algorithm["dynamic_sampling"] = {"max_batches": max_batches}
    policies = {name: {"model": {"path": "m"}} for name in ("p", "q")} | {"f": {"model": {"path": "m"}, "frozen": True}}
    agents = [{"name": name, "policy": name} for name in policies]
    return Workflow(path="w", dag_id="w", agents=agents, policies=policies, nodes=[], algorithm=algorithm)


def episode(uid: str, index: int, reward: float, policies: str = "p") -> Episode:
    calls = []
    for policy in policies:
        call = Call(policy, policy, 0, policy, 0, [1], [2], [1], [-1.0])
        call.reward = reward
        calls.append(call)
    return Episode(uid=uid, index=index, sample={}, calls=calls)


def group(uid: str, rewards: str, policies: str = "p") -> list[Episode]:
    return [episode(uid, index, float(reward), policies) for index, reward in enumerate(rewards)]


def run(batches: list[list[Episode]], flow: Workflow, groups: int = 2):
    asked = []

    async def roll_out(number: int) -> list[Episode]:
        asked.append(number)
        return batches[number]

    rollouts = asyncio.run(collect(roll_out, rows_of, flow, groups=groups))
    assert asked == list(range(rollouts.batches))
    return rollouts


def uids(rows) -> list[str]:
    return list(dict.fromkeys(row.uid for row in rows))


def test_without_dynamic_sampling_a_step_is_one_batch():
    found = run([group("a", "11") + group("b", "01")], workflow())
    assert (found.batches, uids(found.rows), found.metrics) == (1, ["a", "b"], {})


def test_batches_are_drawn_until_enough_groups_have_something_to_compare():
    batches = [
        group("a", "11") + group("b", "01"),
        group("c", "00") + group("d", "00"),
        group("e", "10") + group("g", "01"),
    ]
    found = run(batches, workflow(5))
    assert found.batches == 3 and uids(found.rows) == ["b", "e"]  # g is one more than the step needs
    assert len(found.episodes) == 12
    assert found.metrics == {"dynamic_sampling/batches": 3, "dynamic_sampling/groups": 2}


def test_what_the_last_batch_that_is_allowed_leaves_is_used():
    batches = [group("a", "11") + group("b", "01"), group("c", "00"), group("d", "01")]
    found = run(batches, workflow(2))
    assert (found.batches, uids(found.rows)) == (2, ["b"])
    assert run([group("a", "11")], workflow(1)).rows == []


def test_a_group_is_informative_if_it_is_to_any_trained_policy():
    rows = rows_of([*group("a", "01", "f"), *group("b", "10", "q"), *group("c", "11", "pq"), *group("d", "01", "pqf")])
    assert informative_uids(rows, workflow()) == ["b", "d"]


def test_a_policy_loses_the_groups_in_which_it_has_nothing_to_compare():
    episodes = group("a", "01", "pqf") + group("b", "11", "pqf")
    for one in episodes[:2]:
        one.calls[1].reward = 1.0  # q has nothing to compare in group a
    rows = rows_of(episodes)
    chosen, world = select_rows(rows, workflow())
    assert {name: uids(mine) for name, mine in chosen.items()} == {"p": ["a"], "q": []} and uids(world) == ["a", "b"]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [(None, "abcd"), ((0.0, 1.0), "abc"), ((0.25, 1.0), "bc"), ((0.0, 0.75), "ab"), ((0.6, 0.7), "")],
)
def test_groups_whose_mean_is_too_low_or_too_high_are_left_out_for_their_agent(bounds, kept):
    """Group d earns more than 1 throughout, though not the same."""
    episodes = [
        *group("a", "1000", "pq"),
        *group("b", "0011", "pq"),
        *group("c", "1110", "pq"),
        *group("d", "1232", "pq"),
    ]
    for one in episodes[:4]:
        one.calls[1].reward = 0.5 + one.index / 8  # q is neither too good nor too bad at problem a
    flow = workflow()
    algorithm = flow.algorithm.model_copy(update={"mean_return_between": bounds})
    chosen, _ = select_rows(rows_of(episodes), flow.model_copy(update={"algorithm": algorithm}))
    assert "".join(uids(chosen["p"])) == kept
    assert ("a" in uids(chosen["q"])) is (bounds is None or bounds[0] < 0.6875 < bounds[1])


def test_what_a_call_without_tokens_earned_is_left_to_chained_credit():
    one = episode("a", 0, 1.0, "pqp")
    one.calls[1].response_ids, one.calls[1].response_mask, one.calls[1].rollout_log_probs = [], [], []
    one.calls[2].train = False
    assert [row.policy for row in rows_of([one])] == ["p"]
    rows = rows_of([one], keep_unsampled_rewarded=True)
    assert [(row.policy, row.response_ids, of_calls(row, "position")) for row in rows[1:]] == [
        ("q", [], (1,)),
        ("p", [], (2,)),
    ]
    algorithm = make_algorithm(estimator="gae_chain", whiten=False)
    chosen, world = select_rows(rows, workflow().model_copy(update={"algorithm": algorithm}))
    assert {name: len(mine) for name, mine in chosen.items()} == {"p": 1, "q": 0} and len(world) == 2
    _, returns = estimate(algorithm, rows, values=[torch.zeros(1), None, None])
    assert returns[0].tolist() == [3.0]


@pytest.mark.parametrize("resumed_after", [0, 1, 2])
def test_a_resumed_run_draws_the_samples_that_it_would_have_drawn(monkeypatch, resumed_after):
    """Each sample's fate depends on itself, so steps roll out one to three batches."""

    async def roll_out(config, runner, samples, n, step, *, validate, title, forked):
        return [e for sample, uid in samples for e in group(uid, "01" if sample["lucky"] else "11")]

    monkeypatch.setattr(trainer, "roll_out", roll_out)
    samples = [{"lucky": i % 3 == 0} for i in range(20)]
    actor = SimpleNamespace(rollout=SimpleNamespace(n=2))
    rollout = SimpleNamespace(actor_rollout_ref=actor, data=SimpleNamespace(max_response_length=64))

    def fresh(batches_consumed: int) -> SimpleNamespace:
        sampler = Sampler(len(samples), 4, seed=3)
        made = SimpleNamespace(
            workflow=workflow(3),
            sampler=sampler,
            inputs=SimpleNamespace(train=samples),
            config=rollout,
            batches_consumed=batches_consumed,
            monitors=SimpleNamespace(flag=lambda episodes: None, masked=lambda episode: set()),
        )
        made._one_call_per_row = lambda: False
        made._runner_of = lambda workflow: None
        return made

    def steps(run, numbers) -> list[list[str]]:
        drawn = []
        for step in numbers:
            rollouts = asyncio.run(trainer.Trainer._collect(run, step, run.workflow))
            run.batches_consumed += rollouts.batches  # as a step does that is kept
            drawn.append(uids(rollouts.rows))
        return drawn

    whole = fresh(0)
    expected = steps(whole, range(1, 5))
    assert whole.batches_consumed > 4 and all(expected)
    first = fresh(0)
    before = steps(first, range(1, resumed_after + 1))
    again = fresh(first.batches_consumed)  # what a checkpoint keeps
    assert before + steps(again, range(resumed_after + 1, 5)) == expected


def test_several_steps_in_a_row_without_a_trained_row_are_warned_of(caplog):
    idle, equal = IdleSteps(workflow()), group("a", "11")
    for step, trained in enumerate([0, 0, 4, 0, 0, 0, 0, 0, 0], start=1):
        idle.count(step, trained=trained, rows=rows_of(equal), episodes=equal)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts] == [f"steps 4 to {last} trained nothing" for last in (6, 9)]
    assert all("in every group all rewards are equal" in text for text in texts)


@pytest.mark.parametrize(
    ("policies", "change", "reason"),
    [
        (
            "pf",
            {"unscored": True},
            "every call is left out, since a reward function returned no score .*; failed calls: unreadable: empty",
        ),
        ("p", {"unscored": True}, "every call is left out, since a reward function returned no score"),
        ("pp", {"unscored": True}, "every call is left out, since a reward function returned no score"),
        ("f", {}, "no call of a trained policy sampled a token"),
        ("pf", {"train": False}, "no call of a trained policy sampled a token"),
        ("p", None, "a fault ended every episode, most often: .*refused"),
    ],
)
def test_the_warning_about_idle_steps_has_the_true_reason(caplog, policies, change, reason):
    """With rows of frozen policies, whose rewards are equal, beside them."""
    flow = workflow()
    episodes, idle = group("a", "11", policies), IdleSteps(flow)
    for one in episodes:
        if change is None:
            one.fault = {"boundary": "sandbox", "infra": True, "where": "x", "message": "connection refused"}
        for call in one.calls:
            if call.policy == "f":
                call.parsed = {"failed": "unreadable: empty"}
        for name, value in (change or {}).items():
            setattr(next(call for call in reversed(one.calls) if call.policy == "p"), name, value)
    rows = rows_of(episodes, unscored=flow.algorithm.unscored_scope)
    assert not any(row.policy == "p" for row in rows)
    for step in range(3):
        idle.count(step, trained=0, rows=rows, episodes=episodes)
    assert re.search(f"trained nothing: {reason}", caplog.text)
