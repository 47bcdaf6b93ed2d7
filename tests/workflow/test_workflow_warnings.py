"""What is legal, yet seldom meant: it loads, and a warning says at which place."""

from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow

TEXT = """\
dag_id: demo
agents:
  - {name: left, policy: one, role: solver}
  - {name: right, policy: two, role: solver}
  - {name: judge, policy: two}
policies:
  one: {model: {path: m}, train_cycle: 5}
  two: {model: {path: m}, train_cycle: 5}
algorithm: {group_by: [uid, role]}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right}
  - {id: j, agent: judge, after: [l, r]}
  - {id: pay, reward: score.py:score, after: j}
"""
NOT_POOLED = "9:29: algorithm.group_by[1]: role `solver` has several policies (one, two), whose calls are not compared"
UNEVEN = (
    "8:27: policies.two.train_cycle: the train_cycles differ (one 5, two 3): some steps update several of these "
    "policies, others none"
)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", [NOT_POOLED]),
        ("right, policy: two", "right, policy: one", []),
        ("role: solver}\n  - {name: right", "role: first}\n  - {name: right", []),
        ("m}, train_cycle: 5}\nalg", "m}, train_cycle: 3}\nalg", [UNEVEN, NOT_POOLED]),
    ],
)
def test_what_is_seldom_meant_is_warned_of(tmp_path, old, new, expected):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(TEXT.replace(old, new, 1))
    found = load_workflow(tmp_path / "flow.yaml").warnings
    assert [f"{p.line}:{p.column}: {p.where}: {p.message}" for p in found] == expected


@pytest.mark.parametrize(
    ("options", "clip", "warned"),
    [
        ("policy_loss: gspo", (3e-4, 4e-4), []),
        ("policy_loss: gspo, clip_ratio_high: 1.0e-3", (3e-4, 1e-3), []),
        ("policy_loss: gspo, clip_ratio_low: 0.2", (0.2, 4e-4), ["clip_ratio_low"]),
        (
            "policy_loss: gspo, clip_ratio_low: 0.2, clip_ratio_high: 0.28",
            (0.2, 0.28),
            ["clip_ratio_low", "clip_ratio_high"],
        ),
        ("policy_loss: vanilla", (0.2, 0.2), []),
        ("policy_loss: cpgd, clip_ratio_high: 0.28", (0.2, 0.28), []),
    ],
)
def test_gspo_clips_at_the_papers_ratios_and_warns_of_a_tokens(tmp_path, options, clip, warned):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    text = TEXT.replace("algorithm: {group_by: [uid, role]}", f"algorithm: {{{options}}}").replace(", role: solver", "")
    (tmp_path / "flow.yaml").write_text(text)
    workflow = load_workflow(tmp_path / "flow.yaml")
    assert (workflow.algorithm.clip_ratio_low, workflow.algorithm.clip_ratio_high) == clip
    assert [p.where for p in workflow.warnings] == [f"algorithm.{key}" for key in warned]
    assert all("gspo clips a sequence's mean ratio" in p.message for p in workflow.warnings)


ROUNDS = """\
dag_id: demo
agents: [{name: solver, policy: one}, {name: still, policy: two}]
policies: {one: {model: {path: m}}, two: {model: {path: m}, frozen: true}}
episode: {max_turns: 1}
algorithm: {group_by: [uid, agent], gamma_turn: 0.9}
loops: {again: {nodes: [l], max_rounds: 1}}
nodes:
  - {id: l, agent: solver}
  - {id: r, agent: solver}
  - {id: s, agent: still}
  - {id: pay, reward: score.py:score, after: [l, r, s]}
"""
TURNS, LOOP = ("max_turns: 1", "max_turns: 3"), ("max_rounds: 1", "max_rounds: 3")
ROLES = [
    ("solver, policy: one}", "solver, policy: one, role: same}, {name: other, policy: one, role: same}"),
    ("agent: solver}\n  - {id: s", "agent: other}\n  - {id: s"),
]


def write_rounds(tmp_path, edits):
    """Write ROUNDS with `edits`, and the reward that it names."""
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    text = ROUNDS
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "flow.yaml").write_text(text)
    return tmp_path / "flow.yaml"


@pytest.mark.parametrize(
    ("edits", "keys"),
    [
        ([], "`node`"),  # one agent at two nodes
        ([("uid, agent]", "uid, agent, node]")], None),
        ([TURNS], "`node`, `turn`"),
        ([TURNS, ("uid, agent]", "uid, node, turn]")], None),
        ([TURNS, ("uid, agent]", "uid, agent, prompt_hash]")], None),
        ([TURNS, ("gamma_turn: 0.9", "gamma_turn: 0")], None),
        ([TURNS, (", gamma_turn: 0.9", "")], None),
        ([TURNS, ("max_turns", "train_turns: last, max_turns")], "`node`"),
        ([LOOP], "`node`, `round`"),
        ([LOOP, ("nodes: [l]", "nodes: [l, r]")], "`node`, `round`"),
        ([LOOP, ("nodes: [l]", "nodes: [l, r]"), ("uid, agent]", "uid, node]")], "`round`"),
        ([LOOP, ("nodes: [l]", "nodes: [s]")], "`node`"),
        ([LOOP, ("uid, agent]", "uid, agent, round]")], "`node`"),
        ([LOOP, ("uid, agent]", "uid, role, round]"), *ROLES], "`node`"),
        ([LOOP, ("uid, agent]", "uid, agent, role, round]"), *ROLES], None),
        (
            [LOOP, ("nodes: [l]", "nodes: [s]"), (", frozen: true", ""), ("uid, agent]", "uid, agent, round, node]")],
            None,
        ),
        ([LOOP, ("uid, agent]", "uid, agent, node]")], "`round`"),
        ([LOOP, TURNS], "`node`, `turn`, `round`"),
        ([LOOP, ("group_by: [uid, agent], gamma_turn: 0.9", "estimator: magrpo")], None),
        ([TURNS, ("group_by: [uid, agent]", "estimator: reinforce_pp_baseline, group_by: [uid, node]")], "`turn`"),
    ],
)
def test_discounted_sums_of_more_and_of_fewer_calls_are_not_to_be_compared(tmp_path, edits, keys):
    path = write_rounds(tmp_path, edits)
    found = load_workflow(path).warnings
    assert len(found) == (keys is not None)
    for problem in found:
        assert (problem.line, problem.where) == (5, "algorithm.gamma_turn")
        assert problem.message.endswith(f"with calls that have fewer; group by {keys}, too")


OWN = ("gamma_turn: 0.9", "stat_unit: call")
IPPO = ("group_by: [uid, agent], gamma_turn: 0.9", "estimator: ippo, stream: call")


@pytest.mark.parametrize(
    ("edits", "place", "message"),
    [
        ([TURNS, OWN], "algorithm.stat_unit", "agent `solver` may move more than once"),
        ([OWN], "algorithm.stat_unit", "`gamma_turn: 1.0` for all, `gamma_turn: 0.0`"),
        ([("one: {", "one: {critic: {}, "), IPPO], "algorithm.stream", "use `stream: agent`"),
        ([("agent: solver}\n  - {id: s", "agent: still}\n  - {id: s"), OWN], "", ""),
    ],
)
def test_own_rewards_alone_must_be_meant_where_an_agent_moves_more_than_once(tmp_path, edits, place, message):
    path = write_rounds(tmp_path, edits)
    if not place:
        load_workflow(path)
        return
    with pytest.raises(WorkflowError) as error:
        load_workflow(path)
    assert [problem.where for problem in error.value.problems] == [place]
    assert message in str(error.value)
