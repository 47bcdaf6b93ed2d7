from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.policy.resources import Node, check_resources, cpus_needed
from recipe.dag.settings.pools import PoolSpec

ONE_POOL = (PoolSpec((4,), ("a", "b")),)
TWO_NODES = (PoolSpec((8, 8), ("a",)),)


def check(pools, *nodes: Node, platform: str = "cuda") -> None:
    check_resources(pools, nodes, platform, where="this machine", more_cpus="start more")


def test_a_run_that_fits_passes():
    check(ONE_POOL, Node(cpus=21, gpus=4))
    check(TWO_NODES, Node(100, 8), Node(2, 0), Node(100, 8))
    check((PoolSpec((2,), ("a",)), PoolSpec((3,), ("b",)), PoolSpec((3,), ("c",))), Node(64, 3), Node(64, 5))


@pytest.mark.parametrize(
    ("pools", "nodes", "message"),
    [
        (ONE_POOL, [Node(64, 1)], r"needs 4 GPUs .* and this machine has 1 free: lower .*n_gpus_per_node"),
        # Ray packs the processes of a node strictly; four and four are not eight
        (TWO_NODES, [Node(100, 8), Node(100, 4), Node(100, 4)], r"needs 8 \+ 8 GPUs .* has 8 \+ 4 \+ 4 free"),
        (ONE_POOL, [Node(8, 4)], r"needs 20 Ray CPUs .* and 1 more, and this machine has 8 free: start more"),
        (ONE_POOL, [Node(20, 4)], "20 Ray CPUs"),  # services need a CPU of their own
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_the_numbers_and_the_way_out(pools, nodes, message):
    with pytest.raises(UserError, match=message):
        check(pools, *nodes)


def test_without_gpus_a_pool_needs_one_cpu_whatever_the_number_of_policies():
    pools = (PoolSpec((4,), ("a", "b", "c")), PoolSpec((1,), ("d",)))
    assert cpus_needed(pools, "cpu") == 3
    check(pools, Node(cpus=3), platform="cpu")
    with pytest.raises(UserError, match=r"needs 1 \+ 1 Ray CPUs"):
        check(pools, Node(cpus=2), platform="cpu")
