"""The project's own reward nodes: one mistake is one problem, at the marked place; what is sound loads.

A case edits a good file. `§` in a replacement stands right before the character that the problem must point at, and is
taken out again.
"""

from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow

GOOD = """\
dag_id: demo
agents: [{name: left, policy: p}, {name: right, policy: p}, {name: judge, policy: p}]
policies: {p: {model: {path: m}, critic: {}}}
algorithm: {estimator: gae}
episode: {max_turns: 1}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right}
  - {id: both, vote: {}, after: [l, r]}
  - {id: j, agent: judge, after: both}
  - {id: grade, reward: score.py:score, after: j}
  - {id: pay, reward: WHAT, after: grade}
"""
CREDIT, VOTERS = "recipe.dag.reward.credit", "voters: [l, r]"
NO_GRADE = (
    ("after: grade", "after: j"),
    ("score.py:score", f'"{CREDIT}:shaped", args: {{shaping: margin}}'),
)


def shaped(options: str, ref: str = f"{CREDIT}:shaped") -> tuple[str, str]:
    return ("WHAT", f"{ref}, args: {{{options}}}")


def votes(options: str) -> tuple[str, str]:
    return shaped(options, f"{CREDIT}:vote_marginals")


def incentives(options: str) -> tuple[str, str]:
    return shaped(options, f"{CREDIT}:debate_incentives")


def estimator(options: str) -> tuple[str, str]:
    return ("estimator: gae", f"estimator: {options}")


TEAM = ("WHAT", "§recipe.dag.reward.outcome:team_reward")
PLAIN = ("critic: {}", "reference: false")
TURNS = ("max_turns: 1", "max_turns: 2")
LOOP = ("nodes:", "loops: {talk: {nodes: [l, r], max_rounds: 2}}\nnodes:")

ALL = "  - {id: all, vote: {}, after: [l, r, j]}\n"
TWO_VOTES = ("  - {id: grade", ALL + "  - {id: grade")
GRADED_LATER = (
    ("after: grade", "after: j"),
    ("score.py:score, after: j", "score.py:score, after: pay"),
)

OPTIONS = [
    ("shaping", [shaped("shaping: §marginn")], "expected one of `team_local`, "),
    ("near", [shaped("shaping: §marginn")], "got 'marginn'; did you mean `margin`?"),
    ("shaping is no text", [shaped("shaping: §3")], "expected one of `team_local`, "),
    ("other option", [shaped("shaping: margin, §beta: 1")], "shaping `margin` takes no `beta`; available: `alpha`"),
    ("misspelt", [shaped("shaping: margin, §alfa: 1")], "takes no `alfa`; did you mean `alpha`?"),
    ("no options", [shaped("shaping: shared, §gamma: 1")], "takes no `gamma`; it has no options; remove this"),
    ("range", [shaped("shaping: discounted, gamma: §3")], "expected a number from 0 to 1, got 3"),
    ("kind", [shaped("shaping: margin, alpha: §much")], "expected a number, got 'much'"),
    ("truth", [shaped("shaping: margin, alpha: §true")], "expected a number, got true"),
    ("in a file", [shaped("shaping: §marginn", "recipe/dag/reward/credit.py:shaped")], "did you mean `margin`?"),
    ("imported", [shaped("shaping: §marginn", "mine.py:mine")], "did you mean `margin`?"),
    ("negative", [incentives("follow: §-1")], "expected a number of at least 0, got -1"),
    ("no weight", [("WHAT", f"§{CREDIT}:debate_incentives")], "all its weights are 0"),
    ("all 0", [shaped("leave: 0, attract: 0.0, threshold: 0.5", f"§{CREDIT}:debate_incentives")], "one of `follow`"),
    ("one player", [incentives("attract: 1, players: §[[l, j]]")], "expected at least 2 lists of nodes"),
    ("no list", [shaped("shaping: margin, players: [§l, [r]]")], "expected a list of nodes, got 'l'"),
    ("uneven", [shaped("shaping: margin, players: [[l, j], §[r]]")], "as many nodes as the first"),
    ("player twice", [shaped("shaping: margin, players: [[l], [§l]]")], "`l` is listed twice"),
    ("no player", [shaped("shaping: margin, players: [[l], [§rr]]")], "no node `rr`; did you mean `r`?"),
    ("ties", [votes(f"{VOTERS}, ties: §maybe")], "expected one of `first`, `none`, got 'maybe'"),
    ("no voters", [("WHAT", f"§{CREDIT}:vote_marginals")], "needs the argument `voters`"),
    ("one voter", [votes("voters: §[l]")], "expected a list of at least 2 nodes"),
    ("unknown voter", [votes("voters: [l, §rr]")], "no node `rr`; did you mean `r`?"),
    ("voter twice", [votes("voters: [l, r, §r]")], "listed twice"),
    ("voter without a voice", [votes("voters: [l, §both]"), ("vote: {}", "compute: score.py:count")],
     "`both` is a compute node, which has no agent; name a rollout node"),
    ("other order", [votes("voters: §[r, l]")], "the vote `both` counts `l`, `r`, in this order; write the same here"),
    ("nearest vote", [votes("voters: §[j, l, r]"), TWO_VOTES], "the vote `all` counts `l`, `r`, `j`, in this order"),
    ("other ties", [votes(f"{VOTERS}, ties: §none")], "the vote `both` has `ties: first`"),
    ("ties of the vote", [votes(VOTERS), (f"{CREDIT}:v", f"§{CREDIT}:v"), ("vote: {}", "vote: {ties: none}")],
     "the vote `both` has `ties: none`; write the same here"),
    ("other key", [votes(f"{VOTERS}, key: §verdict")], "the vote `both` has `key: answer`"),
    ("text", [votes(f"{VOTERS}, key: §3")], "expected text, got 3"),
    ("no verifier", [shaped("verifier: §jj, generator: l", f"{CREDIT}:conditional_quality")], "no node `jj`"),
    ("no scalar", [shaped("verifier: j, generator: l, right: §[1]", f"{CREDIT}:conditional_quality")], "got a list"),
    ("agent", [shaped("agents: [§lefty]", "recipe.dag.reward.outcome:team_reward")], "did you mean `left`?"),
    ("not graded", [*NO_GRADE, shaped("shaping: §with_outcome")], "no node before it sets one"),
    ("team not graded", [*NO_GRADE, TEAM], "no node before it sets one"),
    ("graded later", [*GRADED_LATER, TEAM], "no node before it sets one"),
]  # fmt: skip

TWICE = [
    ("copied team", [estimator("gae_chain"), TEAM], "gae_chain already carries rewards from agent to agent"),
    ("imported", [estimator("mappo"), ("WHAT", "§mine.py:team_reward")], "`team_reward` copies one reward"),
    *((name, [estimator("mappo"), shaped(f"shaping: §{name}")], f"`{name}` copies one reward to several calls")
      for name in ("shared", "team_local", "with_outcome", "verifier_sum")),
    ("chained", [estimator("gae_chain"), shaped("shaping: §discounted")], "with later rewards, and so does gae_chain"),
    ("vdn", [estimator("vdn"), PLAIN, shaped("shaping: §discounted")], "and so does vdn"),
    ("qmix", [estimator("qmix"), PLAIN, shaped("shaping: §verifier_sum")], "`verifier_sum` copies one reward"),
    ("magrpo", [estimator("magrpo"), TURNS, PLAIN, shaped("shaping: §verifier_sum")], "and so does magrpo"),
    ("ippo", [estimator("ippo"), TURNS, shaped("shaping: §discounted")], "and so does ippo"),
    ("gae", [TURNS, shaped("shaping: §discounted")], "and so does gae, so they would count twice; remove this node"),
    ("grpo", [estimator("grpo"), TURNS, PLAIN, shaped("shaping: §discounted")], "node, or set `gamma_turn: 0`"),
    ("outcome of every turn", [estimator("grpo"), LOOP, PLAIN, shaped("shaping: §with_outcome")], "`gamma_turn: 0`"),
    ("rewards to go", [estimator("grpo, gamma_turn: 0.5, group_by: [uid, agent, turn]"), TURNS, PLAIN,
     shaped("shaping: §discounted")], "node, or set `gamma_turn: 0`"),
]  # fmt: skip

SOUND = [
    [votes(VOTERS)],
    [votes(f"{VOTERS}, ties: none, weight: -0.5"), ("vote: {}", "vote: {ties: none}")],
    [votes("voters: [r, j]"), ("vote: {}", "compute: score.py:count")],
    [votes("voters: [l, r, j]"), TWO_VOTES],
    [votes(VOTERS), ("  - {id: both", ALL + "  - {id: both")],
    [shaped("shaping: with_outcome, beta: 0")],
    [shaped("shaping: discounted, gamma: 0, players: null")],
    [shaped("shaping: margin, players: [[l, j]]")],
    [incentives("attract: 0.5, players: [[l], [r]]")],
    [shaped("verifier: j, generator: l, right: 1", f"{CREDIT}:conditional_quality")],
    [estimator("gae_chain"), shaped("shaping: margin")],
    [estimator("gae_chain"), shaped("agents: [left]", "recipe.dag.reward.outcome:team_reward")],
    [estimator("gae_chain"), TURNS, shaped("agents: [left]", "recipe.dag.reward.outcome:team_reward")],
    [estimator("gae_chain"), LOOP, shaped("agents: [left]", "recipe.dag.reward.outcome:team_reward")],
    [estimator("gae_chain"), ("WHAT", "score.py:team_reward")],
    [estimator("ippo"), shaped("shaping: verifier_sum")],
    [estimator("grpo, gamma_turn: 0"), TURNS, PLAIN, shaped("shaping: discounted")],
    [estimator("magrpo, gamma_turn: 0"), PLAIN, shaped("shaping: discounted")],
    [estimator("vdn, mixer: {gamma_turn: 0}"), TURNS, PLAIN, shaped("shaping: discounted")],
    [estimator("grpo"), PLAIN, shaped("shaping: verifier_sum")],
    [("after: grade", "after: j"), ("WHAT", "recipe.dag.reward.outcome:team_reward")],
]


@pytest.fixture
def load(tmp_path):
    code = "def score(episode): return {}\ndef team_reward(episode): return {}\ndef count(context): return {}\n"
    (tmp_path / "score.py").write_text(code)
    imports = "credit import shaped as mine", "outcome import team_reward"
    (tmp_path / "mine.py").write_text("".join(f"from recipe.dag.reward.{line}\n" for line in imports))

    def load(edits):
        text = GOOD
        for old, new in edits:
            assert old in text
            text = text.replace(old, new, 1)
        marked = next(((n, line.index("§") + 1) for n, line in enumerate(text.splitlines(), 1) if "§" in line), None)
        (tmp_path / "flow.yaml").write_text(text.replace("§", ""))
        return marked, lambda: load_workflow(tmp_path / "flow.yaml")

    return load


@pytest.mark.parametrize(("edits", "what"), [case[1:] for case in OPTIONS + TWICE], ids=[c[0] for c in OPTIONS + TWICE])
def test_one_mistake_is_one_problem_at_its_place(load, edits, what):
    marked, read = load(edits)
    with pytest.raises(WorkflowError) as error:
        read()
    assert [(p.line, p.column) for p in error.value.problems] == [marked], str(error.value)
    assert what in error.value.problems[0].message


@pytest.mark.parametrize("edits", SOUND, ids=range(len(SOUND)))
def test_what_is_sound_loads(load, edits):
    _, read = load(edits)
    assert not read().warnings


@pytest.mark.parametrize(
    ("edits", "warned"),
    [
        ([LOOP, shaped("shaping: §influence")], True),
        ([LOOP, estimator("grpo, gamma_turn: 0"), PLAIN, shaped("shaping: §verifier_sum")], True),
        ([LOOP, shaped("attract: 1", f"§{CREDIT}:debate_incentives")], True),
        ([LOOP, incentives("attract: 1, players: [[l], [r]]")], False),
        ([LOOP, shaped("shaping: margin")], False),
        ([LOOP, ("nodes: [l, r]", "nodes: [l, r, j, both]"), shaped("shaping: influence")], False),
        ([shaped("shaping: influence")], False),
    ],
)
def test_who_speaks_outside_of_the_rounds_that_are_compared_is_warned_of(load, edits, warned):
    marked, read = load(edits)
    found = read().warnings
    assert [(problem.line, problem.column) for problem in found] == ([marked] if warned else [])
    assert all("`players: [[l], [r]]`" in problem.message for problem in found)
