from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.settings.pools import PoolSpec, plan_pools
from recipe.dag.workflow.schema import Workflow


def workflow(**gpus: int | None) -> Workflow:
    policies = {name: {"model": {"path": "m"}, "gpus": count} for name, count in gpus.items()}
    return Workflow(path="w.yaml", dag_id="w", agents=[{"name": "a", "policy": "main"}], policies=policies, nodes=[])


def test_policies_share_all_gpus_by_default():
    assert plan_pools(workflow(a=None, b=None), nnodes=1, n_gpus_per_node=4) == (PoolSpec((4,), ("a", "b")),)
    assert plan_pools(workflow(a=None, b=None), nnodes=2, n_gpus_per_node=8) == (PoolSpec((8, 8), ("a", "b")),)


def test_a_policy_with_gpus_has_a_pool_of_its_own_and_the_others_share_the_rest():
    pools = plan_pools(workflow(a=None, b=2, c=None, d=1), nnodes=1, n_gpus_per_node=4)
    assert pools == (PoolSpec((2,), ("b",)), PoolSpec((1,), ("d",)), PoolSpec((1,), ("a", "c")))


def test_policies_may_take_all_gpus():
    assert plan_pools(workflow(a=1, b=3), nnodes=1, n_gpus_per_node=4) == (
        PoolSpec((1,), ("a",)),
        PoolSpec((3,), ("b",)),
    )


@pytest.mark.parametrize(("gpus", "needed"), [({"a": 3, "b": 2}, 5), ({"a": 4, "b": None}, 5), ({"a": 9}, 9)], ids=str)
def test_too_few_gpus_are_refused_with_the_number_needed(gpus, needed):
    with pytest.raises(UserError, match=f"need at least {needed} GPUs and the run has 4"):
        plan_pools(workflow(**gpus), nnodes=1, n_gpus_per_node=4)


def test_a_policy_with_its_own_gpus_needs_a_run_on_one_node():
    with pytest.raises(UserError, match="trainer.nnodes=1"):
        plan_pools(workflow(a=1, b=None), nnodes=2, n_gpus_per_node=4)
