from __future__ import annotations

import pytest

from recipe.dag.workflow.loader import load_workflow


@pytest.fixture
def workflow_of(tmp_path):
    """Agents a0, a1, ... at nodes n0, n1, ...: side by side, or in a chain; the last one may be frozen."""
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")

    def make(
        agents: int, *, chain=False, frozen=False, algorithm="estimator: vdn", turns=1, policy="{model: {path: m}}"
    ):
        last = agents - 1
        names = [f"{{name: a{i}, policy: {'fixed' if frozen and i == last else 'main'}}}" for i in range(agents)]
        nodes = [
            f"{{node_id: n{i}, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: a{i}"
            + (f", dependencies: [n{i - 1}]}}" if chain and i else "}")
            for i in range(agents)
        ]
        ends = ", ".join(f"n{i}" for i in range(agents))
        nodes.append(
            f"{{node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [{ends}], "
            "executable_ref: score.py:score}"
        )
        fixed = ", fixed: {model: {path: m}, frozen: true}" if frozen else ""
        text = f"dag_id: team\nagents: [{', '.join(names)}]\npolicies: {{main: {policy}{fixed}}}\n"
        text += f"episode: {{max_turns: {turns}}}\nalgorithm: {{{algorithm}}}\nnodes:\n"
        (tmp_path / "team.yaml").write_text(text + "".join(f"  - {node}\n" for node in nodes))
        return load_workflow(tmp_path / "team.yaml")

    return make
