from __future__ import annotations

import re

import pytest

from recipe.dag.workflow.mermaid import to_mermaid
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text

FILE = """\
dag_id: demo
agents: [{name: a, policy: one}, {name: b, policy: two}]
policies:
  one: {model: {path: x}, critic: {}, train_cycle: 5}
  two: {model: {path: x}, critic: {share: one}, train_cycle: 5, lr: 2.0e-6}
algorithm: {estimator: gae_chain}
loops:
  talk: {nodes: [pro, contra], max_rounds: 3, until: {node: contra, matches: '"<end>"'}}
  again: {nodes: [last], max_rounds: 2}
nodes:
  - {id: first, agent: a, when: {sample: hard, equals: true}}
  - {id: pro, agent: a, after: first}
  - {id: contra, agent: b, after: pro, env: env.py:Env}
  - {id: vote, vote: {}, after: [pro, contra]}
  - {id: note, compute: hooks.py:note, after: pro}
  - {id: last, agent: b, after: [vote, note], when: {node: vote, key: share, at_most: 0.5}}
  - {id: score, reward: rewards.py:score, after: last}
"""


@pytest.fixture
def plan(load_text):
    return make_plan(load_text(FILE))


@pytest.fixture
def lines(plan):
    return to_mermaid(plan).splitlines()


def id_of(lines, label):
    return next(re.match(r" *(n\d+)", line)[1] for line in lines if f'"{label}<br/>' in line)


def test_a_loop_is_a_frame_with_an_edge_back(lines):
    start = lines.index('  subgraph loop0["loop talk: up to 3 rounds, until contra matches #quot;#lt;end#gt;#quot;"]')
    inside = lines[start + 1 : lines.index("  end", start)]
    assert [re.search(r'"(\w+)<br', line)[1] for line in inside] == ["pro", "contra"]
    pro, contra, last = (id_of(lines, name) for name in ("pro", "contra", "last"))
    assert f"  {contra} -. next round .-> {pro}" in lines and f"  {last} -. next round .-> {last}" in lines
    assert '  subgraph loop1["loop again: 2 rounds"]' in lines


def test_a_condition_is_the_label_of_the_edges_or_stands_in_a_node_without_any(lines):
    vote, note, last = (id_of(lines, name) for name in ("vote", "note", "last"))
    for name in (vote, note):
        assert f'  {name} -->|"if share of vote is at most 0.5"| {last}' in lines
    assert any('["first<br/>a (one)<br/>if the sample\'s hard is true"]:::p0' in line for line in lines)


def test_votes_compute_nodes_critics_and_envs_look_different(lines):
    text = "\n".join(lines)
    assert re.search(r'n\d+\(\["vote<br/>vote"\]\)\n', text) and re.search(r'n\d+\[/"note<br/>compute"/\]\n', text)
    assert '[("one.values<br/>values")]:::p0' in text and '[("one.critic_update<br/>critic update")]:::p0' in text
    assert "two.values" not in text
    assert '"contra<br/>b (two)<br/>env env.py:Env"' in text


def test_what_serves_all_policies_stands_outside_of_their_frames(lines):
    (place,) = [index for index, line in enumerate(lines) if '{{"chain.advantage<br/>advantage"}}' in line]
    assert place < min(index for index, line in enumerate(lines) if "subgraph" in line)
    chain, update = id_of(lines, "chain.advantage"), id_of(lines, "two.update")
    assert f"  {chain} --> {update}" in lines
    assert f"  {id_of(lines, 'one.values')} -.-> {update}" in lines


def test_every_node_is_drawn_once_and_every_frame_closed(plan, lines):
    boxes = [line for line in lines if re.match(r" +n\d+[\[({]", line)]
    assert len(boxes) == len(plan.nodes)
    assert sum("subgraph" in line for line in lines) == lines.count("  end") == 4


def test_the_text_shows_loops_conditions_critics_and_counts_rounds(plan):
    text = to_text(plan)
    for expected in (
        "talk: pro, contra; up to 3 rounds, until contra matches",
        "again: last; 2 rounds",
        "if share of vote is at most 0.5",
        "vote [vote, after pro, contra]",
        "note [compute, hooks.py:note, after pro]",
        "env env.py:Env",
        "2. chain.advantage",
        "2,048  4 moves x 1 turn x 1 generation x 512 tokens",
    ):
        assert expected in text, expected
    assert re.search(r"one +x +trained in turns of 5 steps +its own", text)
    assert re.search(r"two +x +trained at lr 2e-06 in turns of 5 steps +that of one", text)
    assert plan.rollout == (("first",), ("pro",), ("contra",), ("vote", "note"), ("last",))
