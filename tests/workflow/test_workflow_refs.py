"""`!Ref`: where it may stand, and what it stands for."""

from __future__ import annotations

import pytest

from recipe.dag.workflow.refs import MAX_CHAIN

NODE = "{node_id: a, node_type: MODEL_INFERENCE, node_role: ROLLOUT%s, config: CONFIG}"
SIIRL = f"""\
dag_id: demo
GLOBAL
nodes:
  - {NODE % ""}
  - {{node_id: r, node_type: COMPUTE, node_role: REWARD, dependencies: [a]}}
  - {{node_id: v, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [r]}}
  - {{node_id: t, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [v]}}
"""
OURS = f"""\
dag_id: demo
GLOBAL
agents: [{{name: a, policy: policy_0}}]
policies: {{policy_0: {{model: {{path: m}}}}}}
nodes:
  - {NODE % ", agent: a"}
  - {{node_id: r, node_type: COMPUTE, node_role: REWARD, dependencies: [a], executable_ref: rewards.py:score}}
"""


def text(base: str, known: str, config: str) -> bytes:
    return base.replace("GLOBAL", known).replace("CONFIG", config).encode()


@pytest.mark.parametrize("base", [SIIRL, OURS], ids=["siirl", "ours"])
@pytest.mark.parametrize(
    ("known", "config", "expected"),
    [
        ("global_config: {b: 8}", "{actor.optim.weight_decay: !Ref global_config.b}", 8),
        ("global_config: {b: {actor.optim.weight_decay: 8}}", "!Ref global_config.b", 8),
        ("global_config: {b: 8, o: {optim.weight_decay: !Ref global_config.b}}", "{actor: !Ref global_config.o}", 8),
        ("global_config: {b: !Ref global_config.c.d, c: !Ref global_config.e, e: {d: 8}}",
         "{actor.optim.weight_decay: !Ref global_config.b}", 8),
        ("global_config: {b: [1, !Ref global_config.c], c: 8}",
         "{actor.optim.weight_decay: !Ref global_config.b}", [1, 8]),
        ("global_config: {b: 8}\nx-parked: &p {actor.optim.weight_decay: !Ref global_config.b}", "*p", 8),
        ("global_config: {b: 8}\nx-parked: !Ref global_config.gone", "{actor.optim.weight_decay: 8}", 8),
    ],
)  # fmt: skip
def test_it_stands_for_the_value(base, known, config, expected, load_text):
    policy = load_text(text(base, known, config).decode()).policies["policy_0"]
    assert policy.config == {"actor.optim.weight_decay": expected}


def test_siirls_parked_anchors_may_hold_it_under_any_key(load_text):
    known = "global_config: {lr: 2.0e-6}\nparked: &p {actor.optim.lr: !Ref global_config.lr}"
    workflow = load_text(text(SIIRL, known, "*p").decode())
    assert workflow.policies["policy_0"].lr == 2e-6
    assert [problem.where for problem in workflow.warnings if problem.where == "parked"] == ["parked"]


MANY = ", ".join(f"a{i}: [{', '.join([f'!Ref global_config.a{i + 1}'] * 9)}]" for i in range(9))
LONG = ", ".join(f"a{i}: !Ref global_config.a{i + 1}" for i in range(MAX_CHAIN + 1))


@pytest.mark.parametrize("base", [SIIRL, OURS], ids=["siirl", "ours"])
@pytest.mark.parametrize(
    ("known", "config", "message"),
    [
        ("global_config: {b: !Ref global_config.c, c: !Ref global_config.b}", "{K: 1}",
         "2:20: global_config.b: `!Ref global_config.c` refers to itself"),
        ("global_config: {b: {c: !Ref global_config.b}}", "{K: 1}", "2:24: global_config.b.c: `!Ref global_config.b`"),
        ("global_config: {b: !Ref global_config.c}", "{K: !Ref global_config.b}", "2:20: global_config.b: `!Ref glo"),
        ("global_config: {b: !Ref global_config.c}", "{K: !Ref global_config.b.d}", "2:20: global_config.b: `!Ref g"),
        ("global_config: {b: !Ref global_config.b}", "{K: !Ref global_config.b.d}", "2:20: global_config.b: `!Ref glo"),
        ("global_config: {b: null}", "{K: !Ref global_config.b}", ": `!Ref global_config.b` does not name a v"),
        ("global_config: {b: 8}", "!Ref global_config.b", "nodes[0].config: expected a mapping, got 8"),
        (f"global_config: {{{MANY}, a9: 1}}", "{K: 1}", "the references expand into more than 100000 values"),
        (f"global_config: {{{LONG}, a{MAX_CHAIN + 1}: 1}}", "{K: 1}", "a chain of more than 50 references"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_reported_at_its_place(base, known, config, message, problems_of):
    config = config.replace("K:", "actor.strategy:")
    found = [str(problem).partition("workflow.yaml:")[2] for problem in problems_of(text(base, known, config))]
    assert any(message in line for line in found)
    assert len({line.partition(": ")[0] for line in found}) == len(found) == 1
