from __future__ import annotations

import itertools

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.reward.credit import SHAPINGS, conditional_quality, debate_incentives, shaped, vote_marginals
from recipe.dag.types.record import Call, Episode


def episode(*calls: Call, outcome: float | None = None) -> Episode:
    return Episode(uid="u", index=0, sample={}, calls=list(calls), outcome=outcome)


def call(agent: str, turn: int, reward: float | None, *, round: int = 0, node: str = "", **parsed) -> Call:
    return Call(
        node=node or agent, agent=agent, agent_group=0, policy="p", turn=turn, round=round, reward=reward, parsed=parsed
    )


def paid(scored: Episode, change: dict[str, list[float]]) -> dict[str, list[float]]:
    """What the calls have once the node's rewards are added."""
    return {
        agent: [(c.reward or 0.0) + d for c, d in zip(scored.calls_of(agent), more, strict=True)]
        for agent, more in change.items()
    }


def test_shaping_over_turns_and_rounds_replaces_the_rewards():
    scored = episode(call("a", 0, 1.0), call("b", 0, 0.0), call("a", 0, 0.0, round=1), call("a", 1, 1.0))
    assert paid(scored, shaped(scored, shaping="margin")) == {"a": [1.0, -0.5, 1.25], "b": [0.0]}
    assert paid(scored, shaped(scored, shaping="discounted", gamma=0.5)) == {"a": [1.25, 0.5, 1.0], "b": [0.0]}
    assert paid(scored, shaped(scored, shaping="shared")) == {"a": [1.0, 0.0, 1.0], "b": [1.0]}


def test_outcome_and_incentives_and_calls_that_nobody_paid():
    debate = episode(call("a", 0, 1.0), call("b", 0, None), call("a", 1, 1.0), call("b", 1, 1.0), outcome=1.0)
    assert paid(debate, shaped(debate, shaping="with_outcome", beta=2.0)) == {"a": [3.0, 3.0], "b": [2.0, 3.0]}
    assert paid(debate, debate_incentives(debate, attract=0.25)) == {"a": [1.25, 1.0], "b": [0.0, 1.0]}


def test_a_call_that_is_unscored_is_as_if_it_had_not_been_made():
    debate = episode(call("a", 0, 1.0), call("b", 0, 0.0), call("c", 0, 0.5))
    alone = paid(debate, shaped(debate, shaping="margin"))
    unknown = call("d", 0, None)
    unknown.unscored = True
    debate.calls.append(unknown)
    beside = paid(debate, shaped(debate, shaping="margin"))
    assert {name: reward for name, reward in beside.items() if name != "d"} == alone
    ballots = [call("x", 0, 1.0, node="s1", answer="4"), call("y", 0, 0.0, node="s2", answer="5")]
    two = vote_marginals(episode(*ballots), voters=["s1", "s2", "s3"])
    third = call("z", 0, None, node="s3", answer="5")
    third.unscored = True
    three = vote_marginals(episode(*ballots, third), voters=["s1", "s2", "s3"])
    assert three == two | {"z": [0.0]}
    answer, verdict = call("g", 0, None, node="g"), call("v", 0, 0.5, node="v", verdict=True)
    answer.unscored = True
    judged = conditional_quality(episode(answer, verdict), verifier="v", generator="g")
    assert judged == {"g": [0.0], "v": [0.0]}


@pytest.mark.parametrize("name", SHAPINGS)
def test_every_shaping_can_be_named(name):
    scored = episode(call("a", 0, 1.0), call("b", 0, 0.5), outcome=0.5)
    assert set(shaped(scored, shaping=name)) == {"a", "b"}


def test_votes_pay_the_pivotal_ballots():
    ballots = [call("x", 0, 1.0, node="s1", answer="4"), call("x", 0, 0.0, node="s2", answer="5")]
    ballots += [call("y", 0, 1.0, node="s3", answer="4"), call("z", 0, 1.0, node="judge", answer="4")]
    scored = episode(*ballots)
    voters = ["s1", "s2", "s3", "s4"]
    change = vote_marginals(scored, voters=voters, ties="none", weight=2.0)
    assert paid(scored, change) == {"x": [2.0, 0.0], "y": [2.0], "z": [1.0]}
    assert scored.info == {f"contribution/s{n}": value for n, value in enumerate([1.0, 0.0, 1.0, 0.0], start=1)}


def test_ballots_are_equal_where_a_vote_node_takes_them_for_equal():
    ballots = [call("x", 0, 1.0, node="s1", answer=4), call("y", 0, 1.0, node="s2", answer=" 4 ")]
    scored = episode(*ballots, call("z", 0, 0.0, node="s3", answer="5"))
    change = vote_marginals(scored, voters=["s3", "s1", "s2"])
    assert paid(scored, change) == {"x": [1.0], "y": [1.0], "z": [0.0]}  # without either, 5 would have won the tie


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shaping": "bonus"}, "unknown shaping 'bonus'; choose one of team_local"),
        ({"shaping": "margin", "beta": 1.0}, "margin has other options"),
        ({"shaping": "with_outcome"}, "needs an outcome"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        shaped(episode(call("a", 0, 1.0)), **options)


def test_an_agent_at_two_nodes_is_two_that_move():
    scored = episode(call("a", 0, 1.0, node="m"), call("a", 0, 0.0, node="n"), call("a", 1, 1.0, node="n"))
    assert paid(scored, shaped(scored, shaping="shared")) == {"a": [1.0, 1.0, 1.0]}
    assert paid(scored, shaped(scored, shaping="margin")) == {"a": [1.0, 0.0, 1.5]}


def test_players_join_nodes_stage_by_stage_and_leave_out_the_others():
    """A solver, and then, round by round, the one that defends its answer; a judge."""
    talk = [call("a", 0, 1.0), call("b", 0, 0.0), call("c", 0, 0.0, node="for_a"), call("c", 0, 1.0, node="for_b")]
    more = [call("c", 0, 1.0, node="for_a", round=1), call("c", 0, 1.0, node="for_b", round=1), call("j", 0, 0.5)]
    scored, players = episode(*talk, *more), [["a", "for_a"], ["b", "for_b"]]
    change = shaped(scored, shaping="margin", alpha=1.0, players=players)
    assert paid(scored, change) == {"a": [1.0], "b": [0.0], "c": [-1.0, 2.0, 1.5, 1.5], "j": [0.5]}
    change = debate_incentives(scored, follow=1.0, leave=10.0, attract=100.0, repel=1000.0, players=players)
    # both change sides: a to where b was, and b to where a was; then a's defender is persuaded, too
    assert change == {"a": [100.0 - 0.0], "b": [-100.0], "c": [-1.0, 1.0 + 100.0, 1.0, 0.0], "j": [0.0]}
    assert not any(debate_incentives(episode(call("j", 0, 1.0)), follow=1.0, players=players)["j"])


@pytest.mark.parametrize("rewards", list(itertools.permutations([0.0, 1.0, 0.5])))
def test_a_ballot_is_worth_the_mean_of_those_who_cast_it(rewards):
    scored = episode(*(call(f"a{k}", 0, r, answer=a) for k, (r, a) in enumerate(zip(rewards, "544", strict=True))))
    vote_marginals(scored, voters=["a0", "a1", "a2"], ties="none")
    shared = (rewards[1] + rewards[2]) / 2
    assert scored.info == {"contribution/a0": 0.0, "contribution/a1": shared, "contribution/a2": shared}


@pytest.mark.parametrize(
    ("verdict", "right", "options", "expected"),
    [
        (True, 1.0, {}, 1.0),
        (True, 0.0, {}, 0.0),
        (False, 0.0, {}, 1.0),
        (False, 1.0, {}, 0.0),
        (None, 1.0, {}, 0.25),
        ("CORRECT", 0.5, {"right": "CORRECT"}, 1.0),
        ("CORRECT", 0.5, {"right": "CORRECT", "threshold": 0.6}, 0.0),
    ],
)
def test_who_judges_is_paid_for_a_true_verdict(verdict, right, options, expected):
    before = [call("v", 0, 0.25, verdict=True), call("g", 0, right)]  # nothing to judge yet
    scored = episode(*before, call("v", 0, 0.25, round=1, verdict=verdict))
    change = conditional_quality(scored, verifier="v", generator="g", **options)
    assert paid(scored, change) == {"v": [0.25, expected], "g": [right]}


def test_an_unscored_verdict_changes_no_reward():
    """Its call is in no cell of the table, and an assignment to `verdicts[None]` would fill all of them."""
    unscored = call("v", 1, None, verdict=True)
    unscored.unscored = True
    scored = episode(call("g", 0, 1.0), call("v", 0, 0.25, verdict=False), unscored)
    change = conditional_quality(scored, verifier="v", generator="g")
    assert change == {"g": [0.0], "v": [-0.25, 0.0]}
