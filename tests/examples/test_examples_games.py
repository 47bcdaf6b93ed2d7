"""The toy games separate the methods as the theory says; few seeds, exact gradients."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean

import pytest
import torch

from recipe.dag.app.study import plans, read_study
from recipe.dag.report.study import read_result

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "examples" / "games"
BEST = {"separating": 2, "climbing": 11, "anti_coordination": 1, "relay": 1, "additive": 33.6}
"""What the last arm of a study comes to: its payoff, or its updates."""


@pytest.fixture(scope="module")
def tabular():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(GAMES))
    spec = spec_from_file_location("tabular", GAMES / "tabular.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(GAMES))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("trust", "happo", "both"), [(0.5, 0.90, 0.7875), (1.0, 1.2, 0.60), (2.0, 1.8, -0.45)])
def test_one_large_update_of_the_separating_game(tabular, trust, happo, both):
    payoffs = [tabular.separating((0.3, 0.3), 1, trust=trust, sequential=sequential) for sequential in (True, False)]
    assert [p[0] for p in payoffs] == pytest.approx([0.75, 0.75])
    assert [p[1] for p in payoffs] == pytest.approx([happo, both])


def test_one_small_update_does_not_tell_them_apart(tabular):
    """At .36 the second agent's weighed advantage still has its old sign."""
    sequential, both = (tabular.separating((0.3, 0.3), 1, trust=0.2, sequential=s)[1] for s in (True, False))
    assert sequential == pytest.approx(both) == pytest.approx(4 * 0.36 * 0.64 - 0.36**2)


@pytest.mark.parametrize("trust", [0.2, 0.5, 1.0, 2.0])
def test_sequential_updates_never_lose_and_simultaneous_ones_never_leave_the_diagonal(tabular, trust):
    sequential = tabular.separating((0.3, 0.3), 20, trust=trust, sequential=True)
    assert sequential[-1] == pytest.approx(2.0)
    assert all(later >= earlier - 1e-9 for earlier, later in zip(sequential, sequential[1:], strict=False))
    assert max(tabular.separating((0.3, 0.3), 20, trust=trust, sequential=False)) <= 0.8 + 1e-9
    assert tabular.separating((0.35, 0.22), 20, trust=trust, sequential=True)[-1] == pytest.approx(2.0)


def test_divided_credit_needs_at_most_half_the_updates_at_eight_agents(tabular):
    needed = {
        (agents, mixer): fmean(tabular.additive(agents, mixer=mixer, seed=seed) for seed in range(8))
        for agents in (2, 8, 16)
        for mixer in (False, True)
    }
    assert needed[8, True] <= needed[8, False] / 2
    ratios = [needed[agents, True] / needed[agents, False] for agents in (2, 8, 16)]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] < 1


def test_climbing(tabular):
    """Simultaneous play rarely finds the best joint action, whatever its learning rate; sequential play does."""
    found = [
        (tabular.climbing(100, 3000, **options)[-1] > 10.5).double().mean().item()
        for options in ({"sequential": False}, {"sequential": True}, {"sequential": True, "follower": 10.0})
    ]
    assert found[0] <= 0.25 and found[1] >= 0.85 and found[2] >= 0.98


def test_anti_coordination(tabular):
    shared, token, separate = (
        tabular.anti_coordination(50, layout=layout) for layout in ("shared", "role token", "separate")
    )
    assert shared.max() <= 0.5
    assert token[-1].min() > 0.98 and separate[-1].min() > 0.98


@pytest.mark.parametrize("symbols", [2, 3])
def test_the_relay_is_solved_by_independent_agents(tabular, symbols):
    assert tabular.relay(50, symbols, 3000)[-1].min() > 0.99


@pytest.mark.parametrize("file", sorted(GAMES.glob("studies/exact_*.yaml")), ids=lambda file: file.stem)
def test_the_last_arm_of_a_study_is_played_and_measured(tabular, file, tmp_path):
    study = read_study(file)
    arm = plans(study, file, tmp_path)[-1]
    tabular.main([*arm.program[2:], *arm.settings])
    found = read_result(arm.folder, study.metrics)
    assert found.score == pytest.approx(BEST[file.stem.removeprefix("exact_")], rel=0.02) and found.tokens == 0
