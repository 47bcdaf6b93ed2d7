"""`algorithm.mixer`: what a baseline may read, and which of the block's keys are read."""

from __future__ import annotations

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.mixer import QmixMixer
from recipe.dag.credit.causality import descendants
from recipe.dag.types.move import Move
from recipe.dag.workflow.moves import moves_of, reactions
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text

GOOD = """\
dag_id: demo
agents: [{name: left, policy: one}, {name: right, policy: two}, {name: judge, policy: fixed}]
policies:
  one: {model: {path: a}}
  two: {model: {path: b}}
  fixed: {model: {path: c}, frozen: true}
episode: {max_turns: 1}
algorithm: {estimator: qmix, mixer: {hidden: 8, peers: {right: [left], judge: [left]}}}
loops:
  debate: {nodes: [pro, contra], max_rounds: 3, until: {agree: [pro, contra]}}
nodes:
  - {id: left, agent: left}
  - {id: right, agent: right}
  - {id: pro, agent: left, after: left}
  - {id: contra, agent: right, after: left}
  - {id: vote, after: [pro, contra], vote: {key: answer}}
  - {id: judge, agent: judge, after: vote}
  - {id: score, reward: rewards.py:score, after: judge}
"""
PEERS = "{right: [left], judge: [left]}"
ENV = ("agent: right}", "agent: right, env: 'env.py:Env'}")
WATCH = ("agent: left}", "agent: left, sees_env: true}")
JUDGE = ("after: vote}", "after: [vote, right], sees_env: true}")
REACTS = "comes after it and may react to it; leave it out"

CASES = [
    ("own message", (PEERS, "{left: [§left]}"), "would condition on its own message; leave it out"),
    ("own message in a loop", (PEERS, "{pro: [§pro]}"), "its own message"),
    ("dependency", (PEERS, "{left: [right, §pro]}"), f"condition on `pro`, which {REACTS}"),
    ("through a vote", (PEERS, "{contra: [§judge]}"), f"`judge`, which {REACTS}"),
    ("through the whole loop", ("after: vote", "after: pro"), (PEERS, "{contra: [§judge]}"), REACTS),
    ("later round", (PEERS, "{contra: [§pro]}"), f"`pro` of a later round, which {REACTS}"),
    ("later turn", ("max_turns: 1", "max_turns: 4"), (PEERS, "{right: [§left]}"),
     f"`left` of a later turn, which {REACTS}"),
    ("shared env", ENV, WATCH, JUDGE, (PEERS, "{left: [§judge]}"), f"`judge`, which {REACTS}"),
    ("shared tool", ("{name: left,", "{name: left, tools: ['tool.py:Tool'],"),
     ("{name: right,", "{name: right, tools: ['tool.py:Tool'],"), (PEERS, "{right: [§left]}"), REACTS),
    ("unknown node", (PEERS, "{§wright: [left]}"), "no node `wright`; did you mean `right`?"),
    ("unknown peer", (PEERS, "{right: [§lift]}"), "no node `lift`; did you mean `left`?"),
    ("no message", (PEERS, "{judge: [left, §vote]}"), "`vote` is not a rollout node, and a mixer values the messages"),
    ("peer twice", (PEERS, "{right: [left, §left]}"), "`left` is listed twice"),
    ("block of another", ("estimator: qmix, mixer", "§mixer"), "does not use this option (only vdn, qmix)"),
    ("option of qmix", ("qmix", "vdn"), ("hidden: 8", "§mixing_hidden: 8"), "`vdn` has no mixing network"),
    ("unread tau", ("hidden: 8", "§target_tau: 0.5"), "with `lam: 1` there is no slow copy"),
    ("one turn, lambda", ("hidden: 8", "§lam: 0.5"), "has no effect with `episode.max_turns: 1`"),
    ("one turn, discount", ("hidden: 8", "§gamma_turn: 0.5"), "has no effect with `episode.max_turns: 1`"),
    ("loss", ("hidden: 8", "loss: §square"), "did you mean `squared`?"),
    ("steps", ("hidden: 8", "steps_per_epoch: §0"), "at least 1, got 0"),
    ("tau of zero", ("max_turns: 1", "max_turns: 2"), (PEERS, "{}"), ("hidden: 8", "lam: 0.5, target_tau: §0"),
     "a number above 0, got 0"),
    ("form", ("hidden: 8", "form: §slope"), "did you mean `sloped`?"),
    ("misspelt", ("hidden: 8", "§hiden: 8"), "did you mean `hidden`?"),
    ("chunk", ("hidden: 8", "encoder: {chunk: §0}"), "at least 1, got 0"),
    ("left out groups", ("{estimator: qmix", "{§drop_zero_variance: true, estimator: qmix"), "learns from groups"),
    ("reward for all", ("{estimator: qmix", "{§share_reward_in_agent: true, estimator: qmix"),
     "qmix carries the last agent's reward to the other agents already"),
    ("whole episodes", ("{estimator: qmix", "{stat_unit: §trajectory, estimator: qmix"), "`qmix` always has call"),
    ("discount per call", ("{estimator: qmix", "{§gamma_turn: 0.5, estimator: qmix"), "does not use this option"),
    ("critic", ("one: {", "one: {§critic: {}, "), "critic"),
]  # fmt: skip


@pytest.fixture
def files(folder):
    (folder / "tool.py").write_text(
        "class Tool:\n    async def execute(self, arguments, state): ...\n    async def close(self): ...\n"
    )


def test_the_file_that_the_cases_break_is_good(load_text, files):
    mixer = load_text(GOOD).algorithm.mixer
    assert mixer == QmixMixer(hidden=8, peers={"right": ("left",), "judge": ("left",)})


@pytest.mark.parametrize(("edits", "message"), [pytest.param(case[1:-1], case[-1], id=case[0]) for case in CASES])
def test_one_mistake_is_one_problem_at_its_place(edits, message, expect_one_problem, files):
    expect_one_problem(GOOD, edits, message)


@pytest.mark.parametrize("estimator", ["vdn", "qmix"])
def test_without_a_block_there_is_the_default_one(load_text, estimator):
    block = GOOD[GOOD.index(", mixer") : GOOD.index("}\nloops")]
    expected = make_algorithm(estimator).mixer
    assert load_text(GOOD.replace(block, "").replace("qmix", estimator)).algorithm.mixer == expected
    assert load_text(GOOD.replace(block, "").replace("estimator: qmix", "estimator: grpo")).algorithm.team_value is None


def test_nobody_is_allowed_in_every_workflow(load_text):
    text = GOOD.replace(PEERS, "{right: [], pro: []}").replace("max_turns: 1", "max_turns: 3")
    assert load_text(text).algorithm.mixer.peers == {"right": (), "pro": ()}


def test_one_advantage_node_and_no_critics_are_planned(load_text):
    workflow = load_text(GOOD)
    assert workflow.node("mixer.advantage").policy is None
    assert {n.id for n in workflow.training_nodes} == {"mixer.advantage", "one.update", "two.update"}
    text = to_text(make_plan(workflow))
    assert "estimator qmix, groups by uid, agent, turn" in text and "mixer.advantage" in text


def after(workflow, move: str) -> set[str]:
    graph = reactions(workflow.nodes, workflow.loops, workflow.agents, workflow.episode.max_turns)
    ids = {move.id for move in moves_of(workflow.nodes, workflow.loops, workflow.episode.max_turns)}
    return descendants(graph, [move])[move] & ids


def test_every_call_that_an_episode_can_hold_is_a_move(load_text):
    moves = moves_of(load_text(GOOD).nodes, load_text(GOOD).loops, 2)
    assert len(set(moves)) == len(moves) == 2 * (3 + 2 * 3)
    assert Move("contra", 1, 2) in moves and not any(move.node in ("vote", "score") for move in moves)


def test_what_may_react_through_graph_rounds_and_turns(load_text):
    workflow = load_text(GOOD.replace("max_turns: 1", "max_turns: 2").replace(PEERS, "{}"))
    last = {f"{n}@1.0" for n in ("left", "right", "judge")} | {
        f"{n}@1.{r}" for n in ("pro", "contra") for r in range(3)
    }
    rounds = {f"{node}@0.{number}" for node in ("pro", "contra") for number in (1, 2)}
    assert after(workflow, "right@0.0") == last
    assert after(workflow, "pro@0.0") == last | rounds | {"judge@0.0"}
    assert after(workflow, "contra@0.2") == last | {"judge@0.0"}
    assert after(workflow, "judge@1.0") == set()


def test_an_env_hands_an_action_on_to_who_hears_of_the_step(load_text):
    text = GOOD.replace(PEERS, "{}").replace(*ENV).replace(*JUDGE)
    # `left` waits for nobody and nobody's dependencies lead from it to the judge, but through the loop
    text = text.replace("after: left", "after: right")
    assert "judge@0.0" not in after(load_text(text), "left@0.0")
    watching = load_text(text.replace(*WATCH))
    assert {"judge@0.0", "pro@0.0"} <= after(watching, "left@0.0")
    assert "right@0.0" not in after(watching, "left@0.0")
