from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.dag.episode.rows import rows_of
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.row import RowCall
from tests.rows import of_calls, split_row

FAULT = {"boundary": "model", "infra": True, "where": "", "message": "down"}


def call(prompt: list[int], response: list[int], *, mask: list[int] | None = None, **keys) -> Call:
    mask = mask or [1] * len(response)
    keys = {"node": "solve", "agent": "solver", "agent_group": 0, "policy": "main", "turn": 0, "reward": 1.0, **keys}
    log_probs = [-0.25 * token * bit for token, bit in zip(response, mask, strict=True)]
    return Call(prompt_ids=prompt, response_ids=response, response_mask=mask, rollout_log_probs=log_probs, **keys)


def episode(*calls: Call, uid: str = "u", index: int = 0, fault: dict | None = None) -> Episode:
    return Episode(uid, index, {"prompt": []}, calls=list(calls), fault=fault)


def test_a_call_becomes_a_row():
    (row,) = rows_of(
        [episode(call([1, 2], [3, 4, 5], mask=[1, 0, 1], turn=2, weight_version=7, temperature=0.5), index=3)]
    )
    assert (row.uid, row.episode, row.policy) == ("u", 3, "main")
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert row.rollout_log_probs == [-0.75, 0.0, -1.25]
    (recorded,) = row.calls
    assert recorded == RowCall(
        **{"agent": "solver", "role": "solver", "node": "solve", "end": 3, "reward": 1.0, "turn": 2, "round": 0},
        **{"position": 0, "step": 2, "branch": "", "parts": {}},
    )
    assert (row.weight_version, row.temperature) == (7, 0.5)


def test_calls_that_grow_by_appending_are_one_row():
    calls = (
        call([1], [2, 3], turn=0, reward=0.5),
        call([1, 2, 3, 9], [4], turn=1, reward=0.25),
        call([1, 2, 3, 9, 4], [5, 6], turn=2, reward=None),
    )
    (row,) = rows_of([episode(*calls)])
    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1], [2, 3, 9, 4, 5, 6], [1, 1, 0, 1, 1, 1])
    assert row.rollout_log_probs == [-0.5, -0.75, 0.0, -1.0, -1.25, -1.5]
    assert (of_calls(row, "end"), of_calls(row, "reward")) == ((2, 4, 6), (0.5, 0.25, 0.0))
    assert of_calls(row, "turn") == of_calls(row, "position") == (0, 1, 2)
    assert len(rows_of([episode(*calls)], merge=False)) == 3


def test_role_branches_and_parts_are_kept_through_merging_and_splitting():
    calls = (
        call([1], [2], role="debater", branch="", reward_parts={"grade": 1.0}),
        call([1, 2, 3], [4], turn=1, role="debater", branch="0.0 without hint"),
    )
    (merged,) = rows_of([episode(*calls)])
    assert of_calls(merged, "role") == ("debater", "debater") and of_calls(merged, "branch") == ("", "0.0 without hint")
    assert of_calls(merged, "parts") == ({"grade": 1.0}, {})
    assert split_row(merged) == rows_of([episode(*calls)], merge=False)


def test_rounds_and_positions_are_kept_through_merging_and_splitting():
    calls = (
        call([1], [2], agent="other", node="other"),
        call([1], [2], turn=0, round=0),
        call([1, 2, 3], [4], turn=0, round=1, train=False),
        call([1, 2, 3, 4, 5], [6], turn=0, round=2),
        call([7], [8], turn=1, round=0),
    )
    other, merged, last = rows_of([episode(*calls)])
    assert (of_calls(merged, "round"), of_calls(merged, "position")) == ((0, 2), (1, 3))
    assert of_calls(other, "position") + of_calls(last, "position") == (0, 4)
    assert [(call.round, call.position) for part in split_row(merged) for call in part.calls] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("moves", "steps"),
    [
        ([(0, 0), (1, 0), (2, 0)], [0, 1, 2]),
        ([(0, 0), (2, 0)], [0, 2]),  # skipped in turn 1
        ([(0, 0), (0, 2), (1, 0)], [0, 2, 3]),  # skipped in round 1
        ([(0, 0), (0, 1), (0, 0), (0, 0)], [0, 1, 2, 2]),  # two nodes behind the loop
        ([(0, 1), (1, 1)], [1, 3]),
    ],
)
@pytest.mark.parametrize("dropped", [None, 0, 1])
def test_steps_count_turns_and_rounds_whichever_calls_are_rows(moves, steps, dropped):
    calls = [call([9], [k], turn=t, round=r, train=k != dropped) for k, (t, r) in enumerate(moves)]
    other = [call([9], [9], agent="other", turn=t, round=5) for t, _ in moves]
    made = [c for pair in zip(other, calls, strict=True) for c in pair]
    found = [of_calls(row, "step") for row in rows_of([episode(*made)]) if row.calls[0].agent != "other"]
    assert found == [(step,) for k, step in enumerate(steps) if k != dropped]


def test_only_calls_of_one_policy_and_one_version_merge():
    first = call([1], [2])
    for change in ({"policy": "x"}, {"weight_version": 1}, {"temperature": 0.5}):
        assert len(rows_of([episode(first, call([1, 2, 3], [4], **change))])) == 2
    for prompt in ([1, 2], [1, 9, 3], [1], [2, 1, 2, 3], [9, 2, 3]):
        assert len(rows_of([episode(first, call(prompt, [4]))])) == (1 if prompt == [1, 2] else 2)
    assert len(rows_of([episode(first), episode(call([1, 2, 3], [4]), index=1)])) == 2


def test_calls_of_different_agents_and_nodes_are_one_row_that_knows_each_of_them():
    second = call([1, 2, 3], [4], agent="b", node="check", role="critic", reward=0.5)
    (row,) = rows_of([episode(call([1], [2]), second)])
    assert [(c.agent, c.role, c.node, c.reward) for c in row.calls] == [
        ("solver", "solver", "solve", 1.0),
        ("b", "critic", "check", 0.5),
    ]
    assert row.agents == ["solver", "b"]
    assert (row.agent_mask("solver"), row.agent_mask("b")) == ([1, 0, 0], [0, 0, 1])


def test_a_fork_is_a_row_of_its_own_and_what_follows_joins_the_branch_that_it_continues():
    root, left, right = call([1], [2]), call([1, 2, 3], [4], agent="l"), call([1, 2, 5], [6], agent="r")
    after_left, after_right = call([1, 2, 3, 4, 7], [8], turn=1), call([1, 2, 5, 6, 7], [9], agent="l", turn=1)
    rows = rows_of([episode(root, left, right, after_left, after_right)])
    assert [of_calls(row, "position") for row in rows] == [(0, 1, 3), (2, 4)]
    assert (rows[1].prompt_ids, rows[1].response_ids) == ([1, 2, 5], [6, 7, 9])


def test_a_call_joins_the_longest_row_that_it_extends():
    calls = [call([1, 2, 3], [4]), call([1], [2], agent="late"), call([1, 2, 3, 4, 5], [6])]
    assert [of_calls(row, "position") for row in rows_of([episode(*calls)])] == [(0, 2), (1,)]
    calls = [calls[1], call([1, 2, 3], [4], weight_version=1), calls[2]]
    assert [of_calls(row, "position") for row in rows_of([episode(*calls)])] == [(0, 2), (1,)]


def test_a_rewritten_history_starts_a_row_that_later_calls_join():
    calls = [call([1], [2]), call([7], [8]), call([7, 8, 9], [3])]
    first, second = rows_of([episode(*calls)])
    assert first.response_ids == [2] and second.response_ids == [8, 9, 3]


def test_an_untrained_call_between_two_is_context():
    calls = [call([1], [2]), call([1, 2, 3], [4], train=False), call([1, 2, 3, 4, 5], [6])]
    (row,) = rows_of([episode(*calls)])
    assert (row.response_ids, row.response_mask) == ([2, 3, 4, 5, 6], [1, 0, 0, 0, 1])
    assert row.rollout_log_probs[2] == 0.0


def test_episodes_that_failed_and_calls_that_sampled_nothing_have_no_rows():
    episodes = [
        episode(call([1], [2]), call([1], [2], train=False), call([1], [], agent="b")),
        episode(call([1], [2]), index=1, fault=FAULT),
        episode(call([1], [3]), uid="v"),
    ]
    assert [(row.uid, row.episode) for row in rows_of(episodes)] == [("u", 0), ("v", 0)]
    assert [row.uid for row in rows_of(episodes, on_failure="drop_group")] == ["v"]


def test_making_rows_changes_no_episode():
    episodes = [episode(call([1], [2]), call([1, 2], [3]))]
    before = copy.deepcopy(episodes)
    for row in rows_of(episodes):
        row.response_ids.append(0)
    assert episodes == before


tokens = st.lists(st.integers(0, 3), max_size=4)
responses = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3).map(lambda rest: [(1, True), *rest])
moves = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "any"]),
        tokens,
        responses,
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.floats(-2, 2),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(moves)
def test_merging_keeps_every_sampled_token_and_its_context(plan):
    """Append-only or not, whatever the agents, versions and branches: the same tokens are learnt, in the same
    contexts."""
    calls, last = [], {}
    for turn, (append, extra, response, agent, version, reward) in enumerate(plan):
        prompt = (last.get(append, []) if append else []) + extra
        ids, mask = [token for token, _ in response], [int(bit) for _, bit in response]
        calls.append(
            call(
                prompt,
                ids,
                mask=mask,
                agent=agent,
                turn=turn // 2,
                round=turn % 2,
                weight_version=version,
                reward=reward,
            )
        )
        last[agent] = last["any"] = prompt + ids
    merged, single = rows_of([episode(*calls)]), rows_of([episode(*calls)], merge=False)

    def learnt(rows):
        return sorted(
            (
                call.agent,
                row.weight_version,
                tuple(row.prompt_ids + row.response_ids[:at]),
                row.response_ids[at],
                row.rollout_log_probs[at],
            )
            for row in rows
            for call, (start, end) in zip(row.calls, row.spans(), strict=True)
            for at in range(start, end)
            if row.response_mask[at]
        )

    assert learnt(merged) == learnt(single)
    masked = [row.rollout_log_probs[at] for row in merged for at, bit in enumerate(row.response_mask) if not bit]
    assert not any(masked)
    parts = (part for row in merged for part in split_row(row))
    assert sorted(parts, key=lambda part: part.calls[0].position) == single


def test_train_turns_last_keeps_the_last_turn_that_sampled_anything():
    talk = [call([1], [2], turn=0), call([1], [3], turn=0, agent="b"), call([1, 2, 9], [4], turn=1)]
    cut = [call([5], [6], turn=0), call([7], [], turn=1)]
    episodes = [episode(*talk), episode(*cut, index=1)]
    rows = rows_of(episodes, train_turns="last")
    found = [(row.episode, row.prompt_ids, call.turn, call.position) for row in rows for call in row.calls]
    assert found == [(0, [1, 2, 9], 1, 2), (1, [5], 0, 0)]
    assert len(rows_of(episodes)) == 3
