from __future__ import annotations

from pathlib import Path

import pytest

from examples import happo_factors as study

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured():
    """(divergence, tokens, form) -> line."""
    settings = [(64, 1e-4), (512, 1e-4), (2048, 1e-4), (512, 1e-3)]
    lines = [line for tokens, divergence in settings for line in study.measure(tokens, divergence)]
    return {(line.divergence, line.tokens, line.form): line for line in lines}


@pytest.mark.parametrize("tokens", [64, 512, 2048])
def test_the_mean_over_tokens_is_no_factor_at_the_lengths_of_language_models(measured, tokens):
    line = measured[1e-4, tokens, "sequence_mean"]
    assert line.std < 0.003 and abs(line.recovered) < 0.02


@pytest.mark.parametrize(("divergence", "tokens"), [(1e-4, 64), (1e-4, 512), (1e-4, 2048), (1e-3, 512)])
def test_the_default_recovers_the_correction_as_well_as_the_exact_ratio_and_stays_bounded(measured, divergence, tokens):
    clamped, exact = measured[divergence, tokens, "clamped at 4"], measured[divergence, tokens, "sequence_sum"]
    assert clamped.largest <= 4.0 + 1e-9
    assert clamped.recovered > 0.8 and clamped.error < 1.1 * exact.error
    assert clamped.error < 0.7 * measured[divergence, tokens, "none"].error


def test_a_bound_of_two_loses_a_fifth_of_the_correction_at_2048_tokens(measured):
    assert measured[1e-4, 2048, "clamped at 2"].recovered == pytest.approx(0.8, abs=0.07)


def test_the_table_in_the_documentation_is_what_the_script_measures(measured):
    rows = [line for line in (ROOT / "docs" / "happo.md").read_text().splitlines() if line.startswith("| 0.00")]
    documented = {}
    for row in rows:
        divergence, tokens, form, *numbers = (cell.strip() for cell in row.strip("|").split("|"))
        documented[float(divergence), int(tokens.replace(",", "")), form] = list(map(float, numbers))
    assert len(documented) == 30 and measured.keys() <= documented.keys()
    for key, line in measured.items():
        numbers = [line.std, line.largest, line.ess, line.recovered, line.error]
        assert numbers == pytest.approx(documented[key], rel=0.05, abs=0.05)


def test_the_factors_tried_include_the_default():
    from recipe.dag.algorithms.happo import Happo

    default = {"level": Happo().ratio, "bound": Happo().bound}
    assert default in study.FORMS.values()
