from __future__ import annotations

import asyncio
from functools import partial

import pytest

from recipe.dag.core.errors import GraderFault, RewardFault, UserError
from recipe.dag.reward import group
from recipe.dag.reward.grader import Undecided
from recipe.dag.reward.group import diversity, majority_label, pairwise_ranking
from recipe.dag.types.record import Call, Episode


def episode(index: int, answer: str | None = None, *, text: str = "", truth: str | None = None, **parsed) -> Episode:
    sample = {"prompt": []} | ({"ground_truth": truth} if truth is not None else {})
    parsed |= {"answer": answer}
    call = Call("solve", "solver", 0, "main", 0, text=text, parsed=parsed)
    return Episode("u", index, sample, calls=[call])


def episodes(*answers: str | None, truth: str | None = None) -> list[Episode]:
    return [episode(index, answer, truth=truth) for index, answer in enumerate(answers)]


def label(several: list[Episode], **options) -> list[float | None]:
    return [rewards["solver"] for rewards in asyncio.run(majority_label(several, **options))]


def test_the_most_frequent_answer_is_the_label_and_no_truth_is_needed():
    several = episodes("4", "5", "4", None, "4")
    assert label(several) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert several[1].info == {"majority/label": "4", "majority/share": 0.6}
    assert all(one.outcome is None for one in several)


def test_the_truth_is_compared_with_the_label_and_changes_no_reward():
    for truth, is_right in (("4", 1.0), ("5", 0.0)):
        several = episodes("4", "4", "5", truth=truth)
        assert label(several) == [1.0, 1.0, 0.0]
        assert [one.info["majority/right"] for one in several] == [is_right] * 3


def test_answers_are_equal_if_the_grader_says_so_or_if_their_texts_are():
    answers = ("1/2", "0.5", "1/3", "1/3", r"\frac{1}{2}")
    assert label(episodes(*answers)) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert label(episodes(*answers), compare="text") == [0.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("answers", [("1", "1", "2", "2"), ("1", "2", "3"), (None, None)])
def test_a_tie_scores_nobody_unless_the_first_one_wins(answers):
    several = episodes(*answers)
    assert label(several) == [None] * len(answers) and several[0].info["majority/share"] == 0.0
    expected = [None] * len(answers) if answers[0] is None else [float(answer == answers[0]) for answer in answers]
    assert label(episodes(*answers), ties="first") == expected


def test_a_weak_majority_scores_nobody():
    answers = ("1", "1", "2", "3", None)
    assert label(episodes(*answers), min_share=0.4) == [1.0, 1.0, 0.0, 0.0, 0.0]
    several = episodes(*answers)
    assert label(several, min_share=0.41) == [None] * 5 and several[0].info["majority/share"] == 0.4


def test_an_answer_that_cannot_be_compared_is_unscored_alone(monkeypatch):
    async def grade(prediction: str, truth: str, timeout_s: float) -> bool:
        if prediction == "hangs":
            raise GraderFault("timeout")
        return prediction == truth

    monkeypatch.setattr(group, "decide", grade)
    assert label(episodes("4", "hangs", "4", "5", "hangs")) == [1.0, None, 1.0, 0.0, None]


@pytest.mark.parametrize("answers", [("bomb", "4", "4.0", "5"), ("4", "bomb", "4.0", "5"), ("5", "4", "4.0", "bomb")])
def test_an_answer_on_which_comparisons_do_not_end_is_alone_and_costs_two(monkeypatch, answers):
    asked = []

    async def decide(prediction: str, truth: str, timeout_s: float) -> bool:
        asked.append((prediction, truth))
        if "bomb" in (prediction, truth):
            raise Undecided("timeout")
        return float(prediction) == float(truth)

    monkeypatch.setattr(group, "decide", decide)
    assert label(episodes(*answers)) == [float(answer in ("4", "4.0")) for answer in answers]
    assert sum("bomb" in pair for pair in asked) <= 2


def test_several_agents_may_be_paid_for_the_answer_of_one():
    several = episodes("4", "4", "5")
    for one in several:
        one.calls.insert(0, Call("plan", "planner", 1, "main", 0))
    assert asyncio.run(majority_label(several, weight=0.5))[0] == {"planner": 0.5, "solver": 0.5}
    assert asyncio.run(majority_label(several, agents=["planner"]))[2] == {"planner": 0.0}


@pytest.mark.parametrize("n", [1, 2])
def test_a_group_in_which_the_agent_made_no_call_goes_on(n):
    """Conditions may have skipped its node, or the episodes with a call were lost."""
    several = episodes(*["4", "5"][:n], truth="4")
    assert asyncio.run(majority_label(several, agent="writer")) == [{"solver": None}] * n
    assert [one.info for one in several] == [{"majority/label": "", "majority/share": 0.0, "majority/right": 0.0}] * n
    for measure in ("answer", "ngrams"):
        assert diverse(episodes(*["4", "5"][:n]), agent="writer", measure=measure) == [0.0] * n


def ranked(several: list[Episode], **options) -> list[float | None]:
    return [rewards["solver"] for rewards in asyncio.run(pairwise_ranking(several, **options))]


def test_the_reward_is_the_share_of_siblings_that_are_beaten():
    several = [episode(index, score=score) for index, score in enumerate((3, 1.0, 3, 7))]
    assert ranked(several, judge="solve") == pytest.approx([0.5, 0.0, 0.5, 1.0])
    assert several[0].info == {"ranking/pairs": 3, "ranking/win_rate": 0.5}


def test_an_episode_that_the_judge_did_not_score_is_left_out():
    several = [episode(index, score=score) for index, score in enumerate((3, "high", 5, None))]
    assert ranked(several, judge="solve", weight=2.0) == [0.0, None, 2.0, None]
    assert ranked(several, judge="nobody") == [None] * 4 and ranked(several[:1], judge="solve") == [None]


@pytest.mark.parametrize("is_async", [False, True])
def test_each_pair_is_compared_once(is_async):
    pairs = []

    def longer(first: Episode, second: Episode) -> float | None:
        pairs.append((first.index, second.index))
        if second.index == 3:
            return None
        return 0.5 if first.calls[0].text == second.calls[0].text else float(len(first.calls[0].text) > 1)

    async def later(first: Episode, second: Episode) -> float | None:
        return longer(first, second)

    several = [episode(index, text=text) for index, text in enumerate(("a", "bb", "bb", "cc"))]
    assert ranked(several, compare=later if is_async else longer) == [0.0, 0.75, 0.75, None]
    assert pairs == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_a_comparison_returns_a_number_or_none():
    with pytest.raises(RewardFault, match="`compare` returned float 2.0; return a number from 0 to 1, or None"):
        ranked(episodes("1", "2"), compare=lambda first, second: 2.0)
    with pytest.raises(UserError, match="set either"):
        ranked(episodes("1", "2"))


def diverse(several: list[Episode], **options) -> list[float]:
    return [rewards["solver"] for rewards in diversity(several, **options)]


def test_an_answer_unlike_its_siblings_earns_more():
    several = episodes("4", "4", "5", None)
    assert diverse(several, weight=3.0) == pytest.approx([2.0, 2.0, 3.0, 3.0])
    assert diverse(several, weight=3.0, penalty=True) == pytest.approx([-1.0, -1.0, 0.0, 0.0])
    assert several[0].info == {"diversity/distance": pytest.approx(2 / 3)}
    assert diverse(several[:1]) == diverse(several[:1], penalty=True) == [0.0]


def test_texts_are_compared_by_their_n_grams():
    texts = ("we add two and two", "We add two and three", "count on your fingers")
    several = [episode(index, text=text) for index, text in enumerate(texts)]
    near, far = 1 - 2 / 4, 1.0
    assert diverse(several, measure="ngrams", weight=1.0) == pytest.approx([(near + far) / 2] * 2 + [far])
    assert diverse(several, measure="ngrams", threshold=0.5, weight=1.0) == [0.5, 0.5, 1.0]
    assert diverse(several, measure="ngrams", n=1, threshold=0.4, weight=1.0) == [0.5, 0.5, 1.0]
    assert diverse([episode(k, text="") for k in range(2)], measure="ngrams") == [0.0, 0.0]


def test_only_solved_episodes_earn_if_asked():
    several = episodes("4", "5", "6")
    with pytest.raises(UserError, match="right_only needs the outcome"):
        diverse(several, right_only=True)
    for one in several:
        one.outcome = float(one.index == 1)
    assert diverse(several, right_only=True, weight=1.0) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda several: asyncio.run(majority_label(several)),
        lambda several: asyncio.run(pairwise_ranking(several, judge="solve")),
        partial(diversity, measure="answer"),
    ],
)
def test_the_order_of_the_episodes_does_not_matter(function):
    answers = ("4", "5", "4", "6", None)
    several = [episode(index, answer, score=index % 3) for index, answer in enumerate(answers)]
    forward = [one["solver"] for one in function(several)]
    assert [one["solver"] for one in function(several[::-1])] == forward[::-1]
