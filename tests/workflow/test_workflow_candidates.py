"""Nodes with candidates: what is refused, at the marked place, and where their names and paths lead."""

from __future__ import annotations

import pytest

from recipe.dag.loading.conversion import import_workflow
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.mermaid import to_mermaid
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text
from recipe.dag.workflow.to_yaml import to_yaml
from recipe.dag.workflow.user_files import user_files

GOOD = """\
dag_id: demo
agents: [{name: solver, policy: p}, {name: judge, policy: q}]
policies: {p: {model: {path: m}}, q: {model: {path: m}, frozen: true}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver, candidates: {k: 4, by: judge}}
  - {id: judge, agent: judge, after: solve}
  - {id: pay, reward: rewards.py:score, after: judge}
"""
CODE = """
def good(context, *, weight=1.0): return weight
def two(context, other): return 1.0
"""
TOOL = """
class Notes:
    schema = {"type": "function", "function": {"name": "notes", "description": "", "parameters": {}}}
    async def execute(self, arguments, state): return ""
    async def close(self): ...
"""


@pytest.fixture(autouse=True)
def code(folder):
    (folder / "scores.py").write_text(CODE)
    (folder / "tools.py").write_text(TOOL)


def by(spec: str) -> tuple[tuple[str, str], ...]:
    return (("{k: 4, by: judge}", spec),)


def test_candidates_are_shown_counted_and_written_again(load_text):
    flow = load_text(GOOD)
    plan = make_plan(flow)
    assert "solve [solver, best of 4 by judge]" in to_text(plan)
    assert "best of 4 by judge" in to_mermaid(plan)
    assert [agent.max_generated_tokens for agent in plan.agents] == [4 * 512, 4 * 512]
    assert load_text(to_yaml(flow), "again.yaml").nodes == flow.nodes


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (by("{k: §1, by: judge}"), "expected a number of at least 2, got 1"),
        (by("§{k: 4}"), "candidates.by: missing; this key is required"),
        (by("{k: 4, by: judge, §keeps: best}"), "did you mean `keep`?"),
        (by("{k: 4, by: §judgge}"), "no node `judgge`; did you mean `judge`?; or write `file.py:function`"),
        (by("{k: 4, by: §pay}"), "`pay` is a reward node; name a node with `agent` or `compute`"),
        (
            by("{k: 4, by: §solve}"),
            "`solve` runs once for each candidate, so it must depend on `solve` and nothing else",
        ),
        (by("{k: 4, by: judge, §args: {weight: 2}}"), "only a function takes these"),
        (by("{k: 4, by: scores.py:good, §key: points}"), "a function returns the score"),
        (by("{k: 4, by: §scores.py:best}"), "defines no `best`"),
        (by("{k: 4, by: §scores.py:two}"), "needs the argument `other`"),
        (by("{k: 4, by: scores.py:good, args: {§wait: 1}}"), "takes no `wait`; did you mean `weight`?"),
        (
            (
                (
                    "{id: judge, agent: judge, after: solve}",
                    "{id: judge, agent: judge, after: solve, when: {phase: training}}",
                ),
            )
            + by("{k: 4, by: §judge}"),
            "cannot have a `when`",
        ),
        (
            (("{id: judge, agent: judge,", "{id: judge, agent: judge, env: env.py:Env,"), *by("{k: 4, by: §judge}")),
            "`judge` must not step an env",
        ),
        (
            (
                ("{name: solver, policy: p}", "{name: solver, policy: q, on_failure: skip}"),
                ("p: {model: {path: m}}, ", ""),
                ("candidates:", "§candidates:"),
            ),
            "a candidate that fails ends the attempt",
        ),
        (
            (("nodes:", "loops: {again: {nodes: [solve], max_rounds: 2}}\nnodes:"), *by("{k: 4, by: §judge}")),
            "`judge` must be in the same loop as `solve`",
        ),
        (
            (
                (
                    "{id: pay, reward: rewards.py:score,",
                    "{id: pay, reward: rewards.py:score, §candidates: {k: 2, by: judge},",
                ),
            ),
            "only rollout nodes read this, and this is a reward node",
        ),
        (
            (("{name: solver,", "{name: solver, tools: [tools.py:Notes],"), ("candidates:", "§candidates:")),
            "uses the tool `tools.py:Notes`, which may remember calls",
        ),
        (
            (("{name: judge,", "{name: judge, tools: [tools.py:Notes],"), ("candidates:", "§candidates:")),
            "agent `judge` uses the tool `tools.py:Notes`",
        ),
        (
            (
                ("estimator: grpo", "estimator: gae"),
                ("p: {model: {path: m}}", "p: {model: {path: m}, critic: {}}"),
                ("candidates:", "§candidates:"),
            ),
            "gae needs the return of every call, and candidates that are not kept have none; choose `grpo`",
        ),
        (
            (("estimator: grpo", "estimator: vdn"), ("candidates:", "§candidates:")),
            "vdn needs the return of every call",
        ),
        (
            (
                ("estimator: grpo", "estimator: grpo, kl_reward_coef: 0.1"),
                ("p: {model: {path: m}}", "p: {model: {path: m}, reference: true}"),
                ("candidates:", "§candidates:"),
            ),
            "no return to take the KL from; use `algorithm.kl_loss_coef`",
        ),
        (
            (("estimator: grpo", "estimator: grpo, tree: {§gamma: 0.5}"),),
            "the shaping only multiplies their differences",
        ),
        ((("estimator: grpo", "estimator: grpo, tree: {§lam: 0.5}"),), "only the shaping reads this; set `gamma`"),
        (
            (("estimator: grpo", "estimator: grpo, §tree: {}"), (", candidates: {k: 4, by: judge}", "")),
            "no node of a trained agent has `candidates`",
        ),
    ],
)
def test_a_mistake_is_one_problem_where_it_is_written(expect_one_problem, edits, message):
    expect_one_problem(GOOD, edits, message)


def test_a_frozen_agent_may_have_candidates_with_any_algorithm(load_text):
    text = GOOD.replace("p: {model: {path: m}}", "p: {model: {path: m}, frozen: true}").replace("grpo", "vdn")
    assert load_text(text).node("solve").candidates.k == 4


def test_a_score_of_an_inserted_file_has_its_new_name(load_text, folder):
    load_text(GOOD, "inner.yaml")
    outer = GOOD.replace("  - {id: solve, agent: solver, candidates: {k: 4, by: judge}}\n", "").replace(
        "{id: judge, agent: judge, after: solve}", "{id: talk, workflow: inner.yaml}"
    )
    flow = load_text(outer.replace("after: judge", "after: talk"), "outer.yaml")
    assert flow.node("talk__solve").candidates.by == "talk__judge"


def test_the_file_of_a_score_is_followed_when_the_workflow_moves(load_text, folder):
    path = folder / "workflow.yaml"
    flow = load_text(GOOD.replace("by: judge", "by: scores.py:good"))
    assert "scores.py" in {file.name for file in user_files(flow).values()}
    (folder / "deep").mkdir()
    moved = folder / "deep" / "moved.yaml"
    moved.write_text(import_workflow(path, moved))
    assert load_workflow(moved).node("solve").candidates.by == "../scores.py:good"
