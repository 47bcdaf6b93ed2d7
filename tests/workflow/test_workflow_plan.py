from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_json, to_mermaid, to_text

ROOT = Path(__file__).parents[2]

DEBATE = """\
dag_id: debate
agents:
  - {name: left, policy: weak, sampling: {max_tokens: 100}, tools: [code_interpreter], tool_loop: {max_generations: 3}}
  - {name: right, policy: weak, sampling: {max_tokens: 10, top_k: 5}}
  - {name: judge, policy: strong, sampling: {max_tokens: 7}}
policies:
  weak: {model: {path: small}, gpus: 1}
  strong: {model: {path: big}, frozen: true}
episode: {max_turns: 2}
nodes:
  - {id: end, agent: judge, after: [pro, contra, again]}
  - {id: pro, agent: left}
  - {id: contra, agent: right}
  - {id: again, agent: right, after: pro}
  - {id: reward, reward: score.py:score, after: end}
"""


@pytest.fixture
def debate(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "debate.yaml").write_text(DEBATE)
    return make_plan(load_workflow(tmp_path / "debate.yaml"))


def test_parallel_nodes_share_a_level(debate):
    assert debate.rollout == (("pro", "contra"), ("again",), ("end",))
    assert debate.scoring == (("reward",),)
    assert debate.training == (("weak.advantage",), ("weak.update",)) and debate.training_derived


def test_the_token_budget_counts_nodes_turns_and_generations(debate):
    assert [agent.max_generated_tokens for agent in debate.agents] == [1 * 2 * 3 * 100, 2 * 2 * 1 * 10, 1 * 2 * 1 * 7]
    assert [policy.max_generated_tokens for policy in debate.policies] == [640, 14]
    assert debate.max_generated_tokens == 654


def test_text_shows_agents_policies_order_and_budget(debate):
    text = to_text(debate)
    for line in (
        r"0 +left +weak +pro +temperature 1, max_tokens 100 +code_interpreter \(hermes loop, up to 3 generations\)",
        r"weak +small +trained +- +left, right \(shared\) +1",
        r"strong +big +frozen +- +judge +shared",
        r"1\. pro \[left\] \| contra \[right\]",
        r"2\. again \[right, after pro\]",
        r"1\. reward \[score.py:score\]",
        r"1\. weak\.advantage",
        r"agent left +600 +1 node x 2 turns x 3 generations x 100 tokens",
        r"total +654",
    ):
        assert re.search(line, text), line


def test_json_holds_the_whole_plan(debate):
    data = json.loads(to_json(debate))
    assert data == json.loads(debate.model_dump_json())
    assert data["policies"][1]["trained"] is False and data["nodes"][0]["id"] == "pro"


def test_mermaid_colours_policies_and_keeps_keywords_out_of_ids(debate):
    lines = [line.strip() for line in to_mermaid(debate).splitlines()]
    assert lines[0] == "flowchart TD"
    box = re.compile(r'(n\d+)(?:\[|\{\{)"([^"<]+).*?(?::::(\w+))?$')
    boxes = {match[2]: (match[1], match[3]) for line in lines if (match := box.match(line))}
    assert boxes["pro"][1] == boxes["weak.update"][1] == "p0" and boxes["end"][1] == "p1" and boxes["reward"][1] is None
    assert f"{boxes['pro'][0]} --> {boxes['again'][0]}" in lines
    assert sum(line.startswith("subgraph") for line in lines) == 1 and lines.count("end") == 1
    assert any(line.startswith("classDef p1") and "dasharray" in line for line in lines)


def test_policies_that_wait_for_each_other_are_joined_by_dotted_edges():
    path = ROOT / "workflows" / "workflow_retool_ma_separate.yaml"
    text = path.read_text().replace("estimator: grpo", "estimator: grpo, old_log_probs: trainer")
    mermaid = to_mermaid(make_plan(load_workflow(path, text)))
    assert mermaid.count("-.->") == 6 and mermaid.count("subgraph") == 3


def test_plans_do_not_depend_on_the_hash_seed():
    code = (
        "import sys; from recipe.dag.loading import workflow_file; from recipe.dag.workflow import plan, render\n"
        "p = plan.make_plan(workflow_file.load_workflow(sys.argv[1]))\n"
        "print(render.to_text(p), render.to_mermaid(p), render.to_json(p))"
    )
    path = str(ROOT / "workflows" / "workflow_retool_ma_separate.yaml")
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, path],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("grpo", "Training (derived; estimator grpo, groups by uid, agent)"),
        ("cpgd", "Training (derived; estimator grpo, groups by uid, agent, loss cpgd)"),
        (
            "dapo",
            "Training (derived; estimator grpo, groups by uid, agent, ratios clipped at 1 - 0.2 and 1 + 0.28, "
            "without calls that were cut off, the last 256 tokens cost up to 1, up to 3 batches a step)",
        ),
        (
            "simpletir",
            "Training (derived; estimator grpo, groups by uid, agent, importance ratios per token truncated at 2, "
            "without agents of void turns)",
        ),
        ("simpletir", "  1. main.old_log_probs | main.advantage"),
        ("marft", "  2. chain.advantage"),
    ],
)
def test_the_text_says_how_a_shipped_workflow_learns(name, line):
    workflow = load_workflow(ROOT / "workflows" / f"workflow_{name}.yaml")
    assert line in to_text(make_plan(workflow)).splitlines()


@pytest.mark.parametrize(
    ("algorithm", "credit"),
    [
        ("policy_loss: gspo", "grpo, groups by uid, agent, loss gspo, ratios clipped at 1 - 0.0003 and 1 + 0.0004"),
        ("estimator: grpo, gamma_turn: 0", "grpo, groups by uid, agent, rewards to go at gamma_turn 0"),
        ("estimator: magrpo", "magrpo, groups by uid, agent, node, turn, round, rewards to go at gamma_turn 0.9"),
        (
            "estimator: vdn, mixer: {gamma_turn: 0.5}",
            "vdn, groups by uid, agent, turn, rewards to go at gamma_turn 0.5",
        ),
        ("uncertainty: {alpha: 0.5}", "grpo, groups by uid, agent, weights by uncertainty (alpha 0.5)"),
        ("estimator: reinforce, uncertainty: {alpha: 0}", "reinforce, weights by uncertainty (alpha 0)"),
    ],
)
def test_the_text_says_what_credit_discounts_and_weighs(tmp_path, algorithm, credit):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(DEBATE.replace("nodes:\n", f"algorithm: {{{algorithm}}}\nnodes:\n", 1))
    assert f"Training (derived; estimator {credit})" in to_text(make_plan(load_workflow(tmp_path / "flow.yaml")))


def test_a_declared_chain_says_what_each_node_does(tmp_path):
    chain = """
  - {id: adv, train: advantage, after: [reward, worth]}
  - {id: worth, train: values, policy: weak, after: reward}
  - {id: learn, train: critic_update, policy: weak, after: [adv, worth]}
  - {id: up, train: update, policy: weak, after: [adv, worth]}
"""
    text = DEBATE.replace("{path: small}", "{path: small}, critic: {}").rstrip() + chain
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "flow.yaml").write_text(text.replace("nodes:\n", "algorithm: {estimator: gae_chain}\nnodes:\n", 1))
    shown = to_text(make_plan(load_workflow(tmp_path / "flow.yaml")))
    assert "  1. worth [values]\n  2. adv [advantage]\n  3. learn [critic update] | up [update]\n" in shown


def test_policies_that_learn_one_after_the_other_are_said_to(tmp_path):
    text = DEBATE.replace(", frozen: true", "").replace(
        "nodes:\n", "algorithm: {stat_unit: trajectory, happo: {}}\nnodes:\n", 1
    )
    text = text.replace("name: right, policy: weak", "name: right, policy: other")
    text = text.replace("policies:\n", "policies:\n  other: {model: {path: small}}\n", 1)
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "debate.yaml").write_text(text)
    shown = to_text(make_plan(load_workflow(tmp_path / "debate.yaml")))
    assert "policies one after the other (random; factor clamped at 4 per episode)" in shown


def test_roles_that_are_exchanged_are_said_to_be():
    plan = make_plan(load_workflow(ROOT / "workflows" / "workflow_cory.yaml"))
    assert (plan.exchange, plan.exchange_every) == (("pioneer", "observer"), 5)
    assert "pioneer and observer exchange policies every 5 steps" in to_text(plan)
