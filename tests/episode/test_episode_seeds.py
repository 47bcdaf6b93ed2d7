from __future__ import annotations

from itertools import product

from recipe.dag.episode.attempt import env_seed, generation_seed


def test_no_two_generations_share_a_seed():
    axes = {
        "seed": (0, 1),
        "step": (0, 1, 2, 11),
        "validate": (False, True),
        "uid": ("a", "a1", "1", "b"),
        "index": (0, 1, 10, 12),
        "node": ("x", "y"),
        "turn": (0, 1, 12),
        "round_index": (0, 1, 12),
        "generation": tuple(range(5)),
    }
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    assert len(combinations) > 10_000
    seeds = {generation_seed(c.pop("seed"), **c) for c in combinations}
    assert len(seeds) == len(combinations)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_stay_the_same_from_one_process_to_the_next():
    coordinates = {"step": 3, "validate": False, "uid": "u", "index": 2, "node": "n", "turn": 1, "generation": 0}
    assert generation_seed(7, **coordinates) == 6237646393911473942
    assert generation_seed(7, **coordinates, round_index=0) == 6237646393911473942
    assert env_seed(7, uid="u", env="e.py:E") == 279435025
