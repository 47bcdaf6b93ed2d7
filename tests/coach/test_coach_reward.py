"""Verdicts become rewards: which verdict belongs to which call, what counts, and what cannot be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.coach.reward import coach_scores
from recipe.dag.core.errors import RewardFault
from recipe.dag.types.record import Call, Episode


def acts(node: str, turn: int = 0, round_index: int = 0) -> Call:
    return Call(node, f"{node}_agent", 0, "main", turn, round=round_index, response_mask=[1])


def judges(node: str, turn: int = 0, round_index: int = 0, **parsed: Any) -> Call:
    return Call(node, "coach", 1, "outside", turn, round=round_index, parsed=parsed)


def scored(*calls: Call, **options: Any) -> dict[str, list[float | None]]:
    return coach_scores(episode_of(*calls), **{"coaches": {"coach": "a"}, **options})


def episode_of(*calls: Call) -> Episode:
    return Episode("u", 0, {"prompt": []}, calls=list(calls))


@given(st.floats(0.0, 10.0), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0))
def test_both_weights_act_and_the_scale_divides_once(score, right, process, outcome):
    """The published system read neither weight, and divided in one of its workflows only."""
    got = scored(acts("a"), judges("coach", process=score, outcome=right), process=process, outcome=outcome)
    assert got == {"a_agent": [pytest.approx(process * score / 10.0 + outcome * right)]}


def test_the_reward_of_ones_own_in_the_docs_pairs_verdicts_with_calls():
    docs = (Path(__file__).parents[2] / "docs" / "coaching.md").read_text()
    space: dict[str, Any] = {}
    exec(docs.partition("```python\n")[2].partition("```")[0], space)
    calls = [acts("a"), judges("coach", process=8.0, outcome=None), acts("a", 1), judges("coach", 1, failed="503")]
    assert space["good_enough"](episode_of(*calls), coach="coach", judged="a") == {"a_agent": [1.0, None]}


def test_another_scale():
    assert scored(acts("a"), judges("coach", process=4.0, outcome=None), scale=5.0) == {"a_agent": [0.8]}


@pytest.mark.parametrize(
    ("verdict", "weights", "reward"),
    [
        ({"failed": "unreadable"}, {}, None),
        ({}, {}, None),
        ({"failed": "unreadable", "process": 8.0}, {}, None),
        ({"process": None, "outcome": 1.0}, {}, None),
        ({"process": None, "outcome": 1.0}, {"process": 0.0, "outcome": 1.0}, 1.0),
        ({"process": 8.0, "outcome": None}, {}, 0.8),
        ({"process": 8.0, "outcome": None}, {"outcome": 0.5}, None),
        ({"process": 8.0, "outcome": None}, {"outcome": {"coach": 0.0}}, 0.8),
        ({"process": 8.0, "outcome": 1.0}, {"process": {"coach": 0.5}, "outcome": {"coach": 2.0}}, 2.4),
        # nothing counts: every call gets the 0.0 that the weights give it, whatever the coach said
        ({"failed": "unreadable"}, {"process": 0.0}, 0.0),
    ],
)
def test_a_verdict_must_have_what_counts(verdict, weights, reward):
    expected = None if reward is None else pytest.approx(reward)
    assert scored(acts("a"), judges("coach", **verdict), **weights) == {"a_agent": [expected]}


def test_a_verdict_without_what_counts_is_a_failed_one():
    episode = episode_of(acts("a"), judges("coach", process=8.0, outcome=None))
    coach_scores(episode, coaches={"coach": "a"}, outcome=0.5)
    assert episode.info == {"coach/a_agent/count": 0, "coach/a_agent/failed": 1}


@pytest.mark.parametrize("value", [11.0, -0.5, float("nan"), "8"])
def test_a_score_that_is_not_on_the_scale_is_an_error_and_not_a_reward(value):
    with pytest.raises(RewardFault, match="is not between 0 and 10; is `scale` that of the template"):
        scored(acts("a"), judges("coach", process=value, outcome=None))


def test_a_weight_by_coach_must_name_it():
    with pytest.raises(RewardFault, match="`outcome` has no weight for coach coach"):
        scored(acts("a"), judges("coach", process=1.0, outcome=None), outcome={"other": 1.0})


def test_verdicts_belong_to_the_calls_of_their_turn_and_round():
    calls = [
        call
        for turn in (0, 1)
        for number in (0, 1)
        for call in (acts("a", turn, number), judges("coach", turn, number, process=turn * 2.0 + number, outcome=None))
    ]
    assert scored(*calls) == {"a_agent": [0.0, 0.1, 0.2, pytest.approx(0.3)]}
    # one of them fails: it alone has no reward
    calls[3].parsed = {"failed": "down"}
    assert scored(*calls) == {"a_agent": [0.0, None, 0.2, pytest.approx(0.3)]}
    # one of them did not run, by its condition
    assert scored(*calls[:3], *calls[4:]) == {"a_agent": [0.0, None, 0.2, pytest.approx(0.3)]}


def test_a_verdict_of_a_round_in_which_the_node_was_skipped_belongs_to_no_call():
    calls = [acts("a"), judges("coach", process=4.0, outcome=None), judges("coach", 0, 1, failed="node a was skipped")]
    assert scored(*calls) == {"a_agent": [0.4]}


def test_a_coach_behind_a_loop_judges_the_last_call_of_the_turn():
    loop = [acts("a"), acts("a", 0, 1), acts("a", 0, 2)]
    good, bad = judges("coach", process=8.0, outcome=None), judges("coach", failed="down")
    assert scored(*loop, good) == {"a_agent": [0.0, 0.0, 0.8]}
    assert scored(*loop, bad) == {"a_agent": [0.0, 0.0, None]}
    episode = episode_of(*loop, good)
    coach_scores(episode, coaches={"coach": "a"})
    assert episode.info == {"coach/a_agent/mean": 0.8, "coach/a_agent/count": 1, "coach/a_agent/failed": 0}


def test_several_coaches_and_nodes():
    first, second = judges("coach", process=4.0, outcome=None), judges("second", process=6.0, outcome=None)
    calls = [acts("a"), first, second, acts("b"), judges("third", failed="down"), acts("c")]
    episode = episode_of(*calls)
    rewards = coach_scores(episode, coaches={"coach": "a", "second": "a", "third": "b"})
    assert rewards == {"a_agent": [pytest.approx(1.0)], "b_agent": [None]}
    assert episode.info["coach/a_agent/mean"] == 0.5 and episode.info["coach/a_agent/count"] == 2
    assert (episode.info["coach/b_agent/count"], episode.info["coach/b_agent/failed"]) == (0, 1)
    assert "coach/b_agent/mean" not in episode.info
    for lost in (1, 2):  # a sum with an unknown part is unknown
        verdicts = [judges(calls[k].node, failed="down") if k == lost else calls[k] for k in (1, 2)]
        assert scored(calls[0], *verdicts, coaches={"coach": "a", "second": "a"}) == {"a_agent": [None]}


def test_calls_of_the_agent_at_other_nodes_get_nothing():
    other = Call("elsewhere", "a_agent", 0, "main", 0, response_mask=[1])
    assert scored(other, acts("a"), judges("coach", process=5.0, outcome=None)) == {"a_agent": [0.0, 0.5]}


def test_an_agent_that_never_acted_has_no_rewards():
    assert scored(acts("b")) == {}
