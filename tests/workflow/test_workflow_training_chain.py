from __future__ import annotations

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.types.model import Model
from recipe.dag.workflow.agent_schema import Agent, Policy
from recipe.dag.workflow.schema import Node
from recipe.dag.workflow.training_chain import derive_training_chain


def policies(**options):
    return {name: Policy(model=Model(path="x"), **given) for name, given in options.items()}


def episode_nodes():
    rollout = Node(node_id="a", node_type="MODEL_INFERENCE", node_role="ROLLOUT")
    return (rollout, Node(node_id="r", node_type="COMPUTE", node_role="REWARD", dependencies=("a",)))


RECOMPUTED = make_algorithm(old_log_probs="trainer")


@pytest.mark.parametrize(
    ("algorithm", "computed"),
    [
        ({}, False),
        ({"old_log_probs": "trainer"}, True),
        ({"old_log_probs": "rollout"}, False),
        ({"mini_batches": 2}, True),
        ({"epochs": 2}, True),
        ({"mini_batches": 2, "old_log_probs": "rollout"}, False),
        ({"importance": {}}, True),
        ({"happo": {}}, True),
        ({"kl_reward_coef": 0.1}, True),
        ({"kl_loss_coef": 0.1}, False),
        ({"policy_loss": "cpgd"}, False),
        ({"uncertainty": {}}, False),
    ],
    ids=str,
)
def test_old_log_probs_are_computed_where_something_depends_on_them(algorithm, computed):
    agents = [Agent(name="x", policy="main")]
    chain = derive_training_chain(
        policies(main={"reference": True}), agents, episode_nodes(), make_algorithm(**algorithm)
    )
    assert ("main.old_log_probs" in [node.node_id for node in chain]) is computed


def test_the_derived_chain_fixes_all_log_probs_before_any_update():
    agents = [Agent(name="x", policy="first"), Agent(name="y", policy="cold"), Agent(name="z", policy="second")]
    chain = derive_training_chain(
        policies(first={"reference": True}, cold={"frozen": True}, second={}), agents, episode_nodes(), RECOMPUTED
    )
    assert [node.node_id for node in chain] == [
        "first.old_log_probs", "first.reference", "second.old_log_probs",
        "first.advantage", "second.advantage",
        "first.update", "second.update",
    ]  # fmt: skip
    by_id = {node.node_id: node for node in chain}
    forward = ("first.old_log_probs", "first.reference", "second.old_log_probs")
    assert by_id["first.update"].dependencies == (*forward, "first.advantage")
    assert by_id["second.update"].dependencies == (*forward, "second.advantage")
    assert all(node.dependencies == ("r",) for node in chain if not node.node_id.endswith("update"))
    assert {node.policy: node.agent_group for node in chain} == {"first": 0, "second": 2}
    assert [node.only_forward_compute for node in chain] == [True, True, True, False, False, False, False]


def test_nothing_is_derived_for_frozen_policies():
    agents = [Agent(name="x", policy="cold")]
    assert derive_training_chain(policies(cold={"frozen": True}), agents, episode_nodes(), make_algorithm()) == ()
