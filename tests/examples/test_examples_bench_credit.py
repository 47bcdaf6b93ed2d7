"""The benchmark names every estimator; what the numbers are depends on the machine."""

import re

import pytest

from recipe.dag.algorithms.catalogue import SELECTABLE


@pytest.mark.parametrize("option", [[], ["--ragged"]])
def test_every_estimator_is_measured(option, run_example):
    printed = run_example("bench_credit.py", "--rows", "64", "--tokens", "16", "--rounds", "1", *option)
    lines = re.findall(r"^(\w+) +\d+\.\d\d +\d+\.\d\d +\d+ +\d+\.\d +\d+\.\d$", printed, re.M)
    assert lines == [*SELECTABLE, "uncertainty", "happo", "shaping", "vote"]
    parts = re.findall(r"^(\w+), (\w+) +\d+\.\d\d +\d+\.\d\d +\d+$", printed, re.M)
    assert parts == [(name, part) for name in ("vdn", "qmix") for part in ("credit", "fit")]
