from __future__ import annotations

import pytest

from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import UserError
from recipe.dag.reward.credit import SHAPINGS, debate_incentives, shaped, vote_marginals


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
        ({"shaping": "bonus"}, "'bonus' is none of team_local"),
        ({"shaping": "margin", "beta": 1.0}, "margin has other options"),
        ({"shaping": "with_outcome"}, "needs an outcome"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        shaped(episode(call("a", 0, 1.0)), **options)


def test_an_agent_that_moves_twice_in_a_round_has_no_turns():
    with pytest.raises(UserError, match="agent a moved twice in turn 0, round 0"):
        shaped(episode(call("a", 0, 1.0, node="m"), call("a", 0, 1.0, node="n")), shaping="margin")
