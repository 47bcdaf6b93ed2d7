"""Reward nodes with the scope `group`: they compare the finished episodes of one sample with each other.

Invariant: a reward depends on the episodes of its group alone, not on their order, except where a tie is broken by
`ties: first`. No function here needs a ground truth. An episode that cannot be compared is unscored; its siblings are
not affected.

    - {id: majority, reward: "recipe.dag.reward.group:majority_label", scope: group, after: solve}
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from math import fsum
from typing import Annotated, Any, Literal

from pydantic import Field

from recipe.dag.core.errors import GraderFault, RewardFault, UserError, described
from recipe.dag.credit.vote import majority
from recipe.dag.reward.grader import Undecided, decide, grade
from recipe.dag.reward.outcome import answer_of, written_in
from recipe.dag.types.convention import COMPARE
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.reward import AgentName, AgentNames, Catalogued, NodeName
from recipe.dag.types.values import as_number, normalized

Rewards = dict[str, float | None]
Compare = Callable[[Episode, Episode], float | None | Awaitable[float | None]]
"""Returns 1.0 if the first episode is better, 0.0 if the second is, 0.5 if neither is, None if that is unknown."""


@Catalogued("TTRL, arXiv 2504.16084", "several episodes per sample; no ground truth", copies=True)
async def majority_label(
    episodes: Sequence[Episode],
    *,
    agent: AgentName = "solver",
    agents: AgentNames | None = None,
    compare: Literal["text", "math"] = "math",
    ties: Literal["none", "first"] = "none",
    min_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0,
    weight: float = 1.0,
    grade_timeout_s: Annotated[float, Field(ge=0.0)] = 10.0,
) -> list[Rewards]:
    """Return `weight` for each episode whose answer is the group's most frequent one, and 0 for the others (TTRL,
    arXiv 2504.16084).

    agent: whose last answer in an episode counts; an episode without an answer abstains and earns 0.
    agents: who is paid; None: all agents with a call.
    compare: math: answers are equal if the grader says so. text: if they are the same text.
    ties: none: without a single most frequent answer there is no label, and no agent is scored. first: the answer of
        the episode with the lowest index among them is the label.
    min_share: a label that a smaller share of the group's episodes gave scores no agent.

    Sets `info`: `majority/label`, `majority/share` (of all finished episodes; 0.0 without a label), and
    `majority/right` (1.0 or 0.0) if the sample has a ground truth, which has no other effect.
    """
    answers = [None if call is None else answer_of(call) for call in _last_calls(episodes, agent)]
    if compare == "math":
        classes, lost = await _math_classes(answers, grade_timeout_s)
    else:
        classes, lost = [None if answer is None else normalized(answer) for answer in answers], frozenset()
    winner = majority(classes, ties)
    of_winner = [index for index, answer_class in enumerate(classes) if winner is not None and answer_class == winner]
    share, label = len(of_winner) / len(episodes), answers[of_winner[0]] if of_winner else None
    is_right = await _is_right(label, episodes[0], compare, grade_timeout_s)
    rewards: list[Rewards] = []
    for index, episode in enumerate(episodes):
        episode.info["majority/label"], episode.info["majority/share"] = label or "", share
        if is_right is not None:
            episode.info["majority/right"] = is_right
        scored = label is not None and share >= min_share and index not in lost
        rewards.append(_paid(episode, agents, weight * (index in of_winner) if scored else None))
    return rewards


@Catalogued("win rate among siblings", "several episodes per sample; a comparison, or a node that scores", copies=True)
async def pairwise_ranking(
    episodes: Sequence[Episode],
    *,
    compare: Annotated[Compare, COMPARE] | None = None,
    judge: NodeName | None = None,
    key: str = "score",
    agents: AgentNames | None = None,
    weight: float = 1.0,
) -> list[Rewards]:
    """Return `weight` times the share of its siblings that each episode beats; an undecided pair counts as half a win
    for both.

    compare: `file.py:function`, called as `function(first, second)` once for each pair, in the order of the indices,
        sync or async. It returns 1.0 if the first episode is better, 0.0 if the second is, 0.5 if neither is, and None
        if it cannot say, which leaves the pair out.
    judge: instead of `compare`, a node whose last call scored the episode with a number in `parsed[key]`: the higher
        number wins. Without a number, an episode is left out of all pairs.
    agents: who is paid; None: all agents with a call.

    An episode without a pair is unscored. Sets `info`: `ranking/win_rate` and `ranking/pairs`.
    """
    if (compare is None) == (judge is None):
        raise UserError("pairwise_ranking: set either `compare` (file.py:function) or `judge` (a node)")
    scores = [] if judge is None else [_judged(episode, judge, key) for episode in episodes]
    wins: list[list[float]] = [[] for _ in episodes]
    for first, second in combinations(range(len(episodes)), 2):
        if compare is None:
            result = _higher(scores[first], scores[second])
        else:
            result = await _compared(compare, episodes[first], episodes[second])
        if result is not None:
            wins[first].append(result)
            wins[second].append(1.0 - result)
    rewards: list[Rewards] = []
    for episode, own in zip(episodes, wins, strict=True):
        rate = fsum(own) / len(own) if own else None
        episode.info["ranking/pairs"] = len(own)
        if rate is not None:
            episode.info["ranking/win_rate"] = rate
        rewards.append(_paid(episode, agents, None if rate is None else weight * rate))
    return rewards


# the engine replaces the texts of these options with the functions that they name
pairwise_ranking.loads = {"compare": COMPARE}  # pyright: ignore[reportFunctionMemberAccess]  # a new attribute


@Catalogued("distance to siblings", "several episodes per sample", copies=True)
def diversity(
    episodes: Sequence[Episode],
    *,
    agent: AgentName = "solver",
    agents: AgentNames | None = None,
    measure: Literal["answer", "ngrams"] = "answer",
    n: Annotated[int, Field(ge=1)] = 3,
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None,
    penalty: bool = False,
    right_only: bool = False,
    weight: float = 0.1,
) -> list[Rewards]:
    """Return `weight` times the mean distance of each episode to its siblings, a number from 0 (all the same) to 1.

    agent: whose last text in an episode counts.
    agents: who is paid; None: all agents with a call.
    measure: answer: 1 for different answers (having none is an answer), else 0. ngrams: 1 minus the share of the
        n-grams of words that two texts have in common (Jaccard).
    threshold: siblings up to this distance are duplicates (distance 0), all others count as 1.
    penalty: return the distance minus 1, so that duplicates cost and an episode unlike all others earns 0.
    right_only: episodes that are not solved earn 0; a node before this one must set the outcome.

    An episode without siblings earns 0. Sets `info`: `diversity/distance`.
    """
    calls = _last_calls(episodes, agent)
    if measure == "answer":
        answers = [None if call is None else answer_of(call) for call in calls]
        features = [frozenset({"" if answer is None else f"={normalized(answer)}"}) for answer in answers]
    else:
        features = [_ngrams("" if call is None else written_in(call), n) for call in calls]
    rewards: list[Rewards] = []
    for index, episode in enumerate(episodes):
        own, siblings = features[index], [other for position, other in enumerate(features) if position != index]
        distances = [1.0 - len(own & other) / len(own | other) for other in siblings]
        if threshold is not None:
            distances = [float(distance > threshold) for distance in distances]
        mean = fsum(distances) / len(distances) if distances else float(penalty)
        if distances:
            episode.info["diversity/distance"] = mean
        earns = not right_only or _solved(episode)
        rewards.append(_paid(episode, agents, weight * (mean - float(penalty)) if earns else 0.0))
    return rewards


def _paid(episode: Episode, agents: Sequence[str] | None, reward: float | None) -> Rewards:
    return dict.fromkeys(agents or (call.agent for call in episode.calls), reward)


def _last_calls(episodes: Sequence[Episode], agent: str) -> list[Call | None]:
    """Return the agent's last call in each episode; None where it made none. That may be all: conditions can skip its
    node in a whole group. A name that no agent has is refused when the workflow is loaded."""
    return [next(reversed(episode.calls_of(agent)), None) for episode in episodes]


async def _math_classes(answers: Sequence[str | None], timeout_s: float) -> tuple[list[int | None], frozenset[int]]:
    """Return the class of each answer, the index of the first answer that equals it (None without an answer), and the
    indices of the answers that could not be compared, which have no class. An answer on which comparisons do not end is
    alone in its class."""
    heads: list[int] = []
    class_of: dict[str, int] = {}
    lost: set[str] = set()
    for index, answer in enumerate(answers):
        if answer is None or answer in class_of or answer in lost:
            continue
        try:
            equal, comparable = await _equal_heads(answer, heads, answers, timeout_s)
        except GraderFault:
            # an answer that the grader fails on loses its own reward, not those of its siblings
            lost.add(answer)
            continue
        if not equal and comparable:
            heads.append(index)
        class_of[answer] = equal[0] if equal else index
    classes = [None if answer is None else class_of.get(answer) for answer in answers]
    return classes, frozenset(index for index, answer in enumerate(answers) if answer in lost)


async def _equal_heads(
    answer: str, heads: list[int], answers: Sequence[str | None], timeout_s: float
) -> tuple[list[int], bool]:
    """Return the heads that equal the answer, and whether comparisons with it end. A head with which they do not is
    removed, so that it costs each group one comparison."""
    equal = []
    for head in list(heads):
        try:
            if await decide(answer, str(answers[head]), timeout_s=timeout_s):
                equal.append(head)
        except Undecided:
            try:
                await decide(answer, "0", timeout_s=timeout_s)
            except Undecided:
                return [], False
            heads.remove(head)
    return equal, True


async def _is_right(label: str | None, episode: Episode, compare: str, timeout_s: float) -> float | None:
    """Return whether the label is the sample's ground truth; None without one, or if they cannot be compared."""
    truth = episode.sample.get("ground_truth")
    if truth is None or str(truth) == "":
        return None
    if label is None:
        return 0.0
    if compare == "text":
        return float(normalized(label) == normalized(str(truth)))
    try:
        return float(await grade(label, str(truth), timeout_s=timeout_s))
    except GraderFault:
        return None


def _judged(episode: Episode, judge: str, key: str) -> float | None:
    calls = [call for call in episode.calls if call.node == judge]
    return as_number(calls[-1].parsed.get(key)) if calls else None


def _higher(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    return 0.5 if first == second else float(first > second)


async def _compared(compare: Compare, first: Episode, second: Episode) -> float | None:
    result: Any = compare(first, second)
    if inspect.isawaitable(result):
        result = await result
    number = None if result is None else as_number(result)
    if result is not None and (number is None or not 0.0 <= number <= 1.0):
        raise RewardFault(f"`compare` returned {described(result)}; return a number from 0 to 1, or None")
    return number


def _ngrams(text: str, n: int) -> frozenset[str]:
    """Return the n-grams of the text's words; the whole text if it has fewer than n words."""
    words = text.lower().split()
    return frozenset(" ".join(words[start : start + n]) for start in range(max(1, len(words) - n + 1)))


def _solved(episode: Episode) -> bool:
    if episode.outcome is None:
        raise UserError("diversity: right_only needs the outcome; make this node depend on the node that grades")
    return episode.outcome >= 0.5
