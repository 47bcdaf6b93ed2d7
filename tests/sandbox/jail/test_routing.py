"""The choice of an interpreter: warm if possible, fresh if necessary."""

from __future__ import annotations

import pytest

from recipe.sandbox.jail.routing import COLD, choose

LOADED = {"lean": {"json", "os"}, "sci": {"json", "os", "numpy"}, "data": frozenset()}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("print(1)", "lean"),
        ("import os, sys\nfrom collections import *", "lean"),
        ("import numpy", "sci"),
        ("import os, numpy as np", "sci"),
        ("from sympy.abc import x", "sci"),
        ("def f():\n    from numpy.linalg import norm", "sci"),
        ("import numpy, pandas as pd", "data"),
        ("import numpyro; x = 'import sympy'", "lean"),
        ("# import numpy", "lean"),
        ("import os; os.environ['OMP_NUM_THREADS'] = '4'", COLD),
        ("x = '\0'", COLD),
    ],
)
def test_by_imports(code, kind):
    assert choose(code, [], LOADED) == kind


def test_missing_kinds_are_not_chosen():
    assert choose("import numpy", [], {"lean": {"os"}}) == "lean"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["data.csv", "helper.py"], "lean"),
        (["json.py"], COLD),
        (["./json.py"], COLD),
        (["os/__init__.py"], COLD),
        (["numpy.py"], "lean"),
        (["deep/json.py"], "lean"),
    ],
)
def test_files_that_shadow_what_is_loaded(names, kind):
    assert choose("print(1)", names, LOADED) == kind


def test_files_with_a_zygote_that_has_not_started_yet():
    assert choose("import pandas", ["helper.py"], LOADED) == COLD
    assert choose("import pandas", [], LOADED) == "data"
