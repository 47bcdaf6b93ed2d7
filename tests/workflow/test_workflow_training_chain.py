from __future__ import annotations

import pytest

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.types.model import Model
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.training_chain import derive_training_chain


def policies(**options):
    return {name: Policy(model=Model(path="x"), **given) for name, given in options.items()}


def episode_nodes():
    rollout = Node(id="a", agent="a")
    return (rollout, Node(id="r", reward="f.py:f", after=("a",)))


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
    chain = derive_training_chain(policies(main={"reference": True}), episode_nodes(), make_algorithm(**algorithm))
    assert ("main.old_log_probs" in [node.id for node in chain]) is computed


def test_the_derived_chain_fixes_all_log_probs_before_any_update():
    chain = derive_training_chain(
        policies(first={"reference": True}, cold={"frozen": True}, second={}), episode_nodes(), RECOMPUTED
    )
    assert [node.id for node in chain] == [
        "first.old_log_probs", "first.reference", "second.old_log_probs",
        "first.advantage", "second.advantage",
        "first.update", "second.update",
    ]  # fmt: skip
    by_id = {node.id: node for node in chain}
    forward = ("first.old_log_probs", "first.reference", "second.old_log_probs")
    assert by_id["first.update"].after == (*forward, "first.advantage")
    assert by_id["second.update"].after == (*forward, "second.advantage")
    assert all(node.after == ("r",) for node in chain if not node.id.endswith("update"))
    assert [(node.policy, node.train) for node in chain] == [tuple(node.id.split(".")) for node in chain]


def test_nothing_is_derived_for_frozen_policies():
    assert derive_training_chain(policies(cold={"frozen": True}), episode_nodes(), make_algorithm()) == ()
