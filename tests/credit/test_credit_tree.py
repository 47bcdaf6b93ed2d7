"""Candidates: closed forms of their advantages, and how they join those of an estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.algorithms.catalogue import ESTIMATORS, make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.tree import candidate_advantages, shaped
from recipe.dag.train.selection import keep_informative
from recipe.dag.types.row import Candidate, Row
from tests.rows import build_row, merge_rows, with_calls

Scores = Sequence[float | None]
PLAIN = {"compare": "siblings", "scale": "none", "gamma": 0.0, "lam": 0.5}


def row(
    episode: int, reward: float = 0.0, *, candidates: Sequence[Candidate | None] = (None,), turn: int = 0, **keys
) -> Row:
    """One call per candidate, each of a sampled and a foreign token; the first one has the reward."""
    calls = enumerate(zip(candidates, [reward, *[0.0] * len(candidates)], strict=False))
    return merge_rows(
        [
            build_row(own, episode=episode, mask=(1, 0), turn=turn + k, position=k, candidate=candidate, **keys)
            for k, (candidate, own) in calls
        ]
    )


def siblings(episode: int, scores: Scores, *, kept: int = 0, reward: float = 0.0, parent: float | None = None, **keys):
    """The rows of all candidates of one prompt, in the order of their indices."""
    candidates = [Candidate(k, tuple(scores), parent, kept=k == kept) for k in range(len(scores))]
    return [row(episode, reward if candidate.kept else 0.0, candidates=[candidate], **keys) for candidate in candidates]


def per_call(rows: Sequence[Row], **options) -> list[float]:
    return [value for values in candidate_advantages(rows, **PLAIN | options) for value in values]


def credit(rows: Sequence[Row], tree: dict | None = None, **options) -> list[float]:
    """The advantages of the sampled tokens; those of all other tokens are 0."""
    algorithm = make_algorithm(**options) if tree is None else make_algorithm(tree=tree, **options)
    advantages, returns = estimate(algorithm, rows)
    for own, tokens in zip(rows, advantages, strict=True):
        assert tokens.dtype == torch.float32 and not any(tokens[torch.tensor(own.response_mask) == 0])
    assert [len(tokens) for tokens in returns] == [len(own.response_ids) for own in rows]
    return [
        value.item() for own, tokens in zip(rows, advantages, strict=True) for value in tokens[::2][: len(own.calls)]
    ]


def test_a_score_is_compared_with_those_of_its_siblings():
    rows = [*siblings(0, (1.0, 4.0, 1.0)), *siblings(1, (5.0, 5.0)), *siblings(2, (9.0,)), row(3)]
    assert per_call(rows) == [-1.0, 2.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    deviation = math.sqrt(3) + 1e-6
    assert per_call(rows, scale="std")[:3] == pytest.approx([-1 / deviation, 2 / deviation, -1 / deviation])


def test_a_candidate_without_a_score_is_not_compared():
    assert per_call(siblings(0, (1.0, None, 4.0))) == [-1.5, 0.0, 1.5]
    assert per_call(siblings(0, (None, None))) == per_call(siblings(0, (None, 3.0))) == [0.0, 0.0]


def test_all_candidates_of_a_sample_are_compared_once():
    rows = [*siblings(0, (0.0, 3.0)), *siblings(1, (6.0, 3.0)), *siblings(0, (8.0, 2.0), uid="v")]
    assert per_call(rows, compare="sample") == [-3.0, 0.0, 3.0, 0.0, 3.0, -3.0]
    others = [*siblings(0, (10.0, 20.0), node="n", agent="x"), *siblings(0, (40.0, 60.0), node="m", policy="q")]
    assert per_call([*rows, *others], compare="sample")[-8:] == [3.0, 0.0, 3.0, -3.0, -5.0, 5.0, -10.0, 10.0]
    # the scores of siblings whose rows are missing count, too
    assert per_call([rows[0], rows[3]], compare="sample") == [-3.0, 0.0]


@pytest.mark.parametrize(
    ("scores", "parent", "expected"),
    [
        ((1.0, 3.0), None, (1.0 + 0.5 * (1 - 3), 3.0 + 0.5 * (3 - 1))),
        ((1.0, 3.0), 2.0, (1.0 + 0.5 * (1 - (0.75 * 2 + 0.25 * 3)), 3.0 + 0.5 * (3 - (0.75 * 2 + 0.25 * 1)))),
        ((1.0, None), 2.0, (1.0 + 0.5 * (1 - 2), None)),
        ((1.0, None), None, (1.0, None)),
        ((0.0, 1.0, 2.0), None, (0.0 + 0.5 * (0 - 1.5), 1.0, 2.0 + 0.5 * (2 - 0.5))),
    ],
)
def test_the_shaping_is_that_of_mars2(scores, parent, expected):
    assert shaped(scores, parent, gamma=0.5, lam=0.25) == pytest.approx(expected)
    assert shaped(scores, parent, gamma=0.0, lam=0.25) == scores


def test_shaped_scores_are_compared_over_the_tree_of_the_sample():
    rows = [*siblings(0, (0.0, 2.0), kept=1), *siblings(0, (2.0, 4.0), kept=1, parent=2.0, turn=1)]
    root, leaf = shaped((0.0, 2.0), None, gamma=1.0, lam=0.5), shaped((2.0, 4.0), 2.0, gamma=1.0, lam=0.5)
    mean = (sum(root) + sum(leaf)) / 4
    found = per_call(rows, compare="sample", gamma=1.0)
    assert found == pytest.approx([score - mean for score in (*root, *leaf)])
    assert found != pytest.approx(per_call(rows, compare="sample"))


NUMBERS = st.lists(st.integers(-40, 40).map(lambda k: k / 8), min_size=2, max_size=6)


@given(scores=NUMBERS, shift=st.integers(-8, 8), seed=st.randoms())
def test_scores_of_siblings_add_up_to_zero_and_neither_shift_nor_order_matters(scores, shift, seed):
    rows = siblings(0, scores)
    found = per_call(rows)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert per_call(siblings(0, [score + shift for score in scores])) == pytest.approx(found, abs=1e-9)
    order = list(range(len(rows)))
    seed.shuffle(order)
    assert per_call([rows[index] for index in order]) == [found[index] for index in order]


def test_the_one_that_was_kept_has_the_episodes_advantage_as_well():
    rows = [*siblings(0, (0.0, 1.0), kept=1, reward=1.0), *siblings(1, (0.5, 0.1), reward=0.0)]
    grpo = {"estimator": "grpo", "scale": "none"}
    assert credit(rows, **grpo) == pytest.approx([-0.5, 0.5 + 0.5, 0.2 - 0.5, -0.2])
    assert credit(rows, {"local": 2.0, "later": 0.5}, **grpo) == pytest.approx([-1.0, 1.0 + 0.25, 0.4 - 0.25, -0.4])
    assert credit(rows, {"later": 0.0}, **grpo) == pytest.approx([-0.5, 0.5, 0.2, -0.2])


def test_calls_of_other_nodes_are_credited_as_without_candidates():
    rows = [
        *siblings(0, (0.0, 1.0), kept=1, reward=1.0),
        row(0, 1.0, agent="checker", node="check"),
        *siblings(1, (0.0, 0.0), reward=0.0),
        row(1, 0.0, agent="checker", node="check"),
    ]
    found = credit(rows, {"later": 0.0}, estimator="grpo", scale="none")
    assert found == pytest.approx([-0.5, 0.5, 0.5, 0.0, 0.0, -0.5])


def test_calls_merged_into_one_row_have_their_own_scores():
    first, second = Candidate(0, (1.0, 0.0)), Candidate(1, (0.2, 0.6), parent=1.0)
    rows = [row(0, 1.0, candidates=[first, second, None]), *siblings(0, (1.0, 0.0))[1:], row(1, 0.0)]
    assert credit(rows, estimator="grpo", scale="none") == pytest.approx([0.5 + 0.5, 0.2 + 0.5, 0.5, -0.5, -0.5])


WITHOUT_CRITIC = [
    name
    for name, method in ESTIMATORS.items()
    if not method.needs_values and not method.spans_policies and not method.pairs_calls
]


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC)
def test_with_every_estimator_the_rest_is_what_it_gives_alone(estimator):
    rows = [*siblings(0, (0.0, 1.0), kept=1, reward=1.0), *siblings(1, (0.5, 0.1), reward=0.0), row(2, 1.0)]
    rows = [with_calls(own, parts={"pay": own.calls[0].reward}) for own in rows]
    kept = [own for own in rows if not own.is_dropped]
    plain = [with_calls(own, candidate=None) for own in kept]
    alone = dict(zip(map(id, kept), credit(plain, estimator=estimator), strict=True))
    local = [-0.5, 0.5, 0.2, -0.2, 0.0]
    expected = [alone.get(id(own), 0.0) + advantage for own, advantage in zip(rows, local, strict=True)]
    assert credit(rows, estimator=estimator) == pytest.approx(expected)


def test_a_batch_of_candidates_that_were_not_kept_is_credited_too():
    assert credit(siblings(0, (0.0, 1.0), kept=1)[:1], estimator="grpo") == [-0.5]


def test_a_row_is_left_out_only_if_neither_comparison_tells_anything():
    algorithm = make_algorithm("grpo", drop_zero_variance=True)
    same = [*siblings(0, (1.0, 1.0), reward=1.0), *siblings(1, (0.0, 0.0), reward=1.0)]
    assert keep_informative(same, algorithm) == []
    local = [*siblings(0, (1.0, 0.0), reward=1.0), *siblings(1, (0.0, 0.0), reward=1.0)]
    assert keep_informative(local, algorithm) == local[:2]
    later = [*siblings(0, (1.0, 1.0), reward=1.0), *siblings(1, (0.0, 0.0), reward=0.0)]
    assert keep_informative(later, algorithm) == [later[0], later[2]]
