from __future__ import annotations

import json
import shutil

import pytest

from recipe.dag.loading.workflow_file import load_workflow

TWO_POLICIES = """\
dag_id: two
agents: [{name: left, policy: a}, {name: right, policy: b}, {name: judge, policy: fixed}]
policies: {a: {model: {path: m}}, b: {model: {path: m}}, fixed: {model: {path: m}, frozen: true}}
algorithm: {old_log_probs: trainer}
nodes:
  - {id: l, agent: left}
  - {id: r, agent: right}
  - {id: j, agent: judge, after: [l, r]}
  - {id: reward, reward: score.py:score, after: j}
"""


@pytest.fixture
def two_policies(tmp_path):
    """Two agents with a policy each, and a judge with a frozen one."""
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "two.yaml").write_text(TWO_POLICIES)
    return load_workflow(tmp_path / "two.yaml")


@pytest.fixture
def workflow_of(tmp_path):
    """Agents a0, a1, ... at nodes n0, n1, ...: side by side, or in a chain; the last one may be frozen."""
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")

    def make(
        agents: int, *, chain=False, frozen=False, algorithm="estimator: vdn", turns=1, policy="{model: {path: m}}"
    ):
        last = agents - 1
        names = [f"{{name: a{i}, policy: {'fixed' if frozen and i == last else 'main'}}}" for i in range(agents)]
        nodes = [f"{{id: n{i}, agent: a{i}" + (f", after: [n{i - 1}]}}" if chain and i else "}") for i in range(agents)]
        ends = ", ".join(f"n{i}" for i in range(agents))
        nodes.append(f"{{id: reward, reward: score.py:score, after: [{ends}]}}")
        fixed = ", fixed: {model: {path: m}, frozen: true}" if frozen else ""
        text = f"dag_id: team\nagents: [{', '.join(names)}]\npolicies: {{main: {policy}{fixed}}}\n"
        text += f"episode: {{max_turns: {turns}}}\nalgorithm: {{{algorithm}}}\nnodes:\n"
        (tmp_path / "team.yaml").write_text(text + "".join(f"  - {node}\n" for node in nodes))
        return load_workflow(tmp_path / "team.yaml")

    return make


@pytest.fixture
def project(tmp_path, tiny_model, monkeypatch):
    """A workflow with its code and problems; a run of it raises `projects.Started` where it would start."""
    from recipe.dag.train.resources import Resources
    from tests.train import projects

    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("model", "fixed"):
        shutil.copytree(tiny_model, folder / name)
    (folder / "flow.yaml").write_text(projects.WORKFLOW.replace("FIXED", str(folder / "fixed")))
    (folder / "hooks.py").write_text(projects.HOOKS)
    (folder / "words.py").write_text("ASK = 'what is'\n")
    (folder / "score.py").write_text("def score(episode):\n    return {}\n")
    (folder / "train.json").write_text(json.dumps(projects.PROBLEMS))
    (folder / "val.json").write_text(json.dumps(projects.UNSEEN))
    monkeypatch.setenv("MODEL_PATH", str(folder / "model"))

    async def start(*args, **options):
        raise projects.Started

    monkeypatch.setattr(Resources, "open", start)
    return folder
