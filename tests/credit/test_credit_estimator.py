from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import gae_chain
from recipe.dag.credit.estimator import ESTIMATORS, estimate
from recipe.dag.credit.gae import gae
from recipe.dag.credit.group import group_relative
from recipe.dag.credit.reinforce import reinforce_pp
from recipe.dag.errors import UserError
from recipe.dag.workflow.schema import Algorithm


def rows_of(make_row):
    return [make_row(r, episode=i, turn=i % 2, mask=(1, 0, 1), position=0) for i, r in enumerate([1.0, 0.0, 0.5, 2.0])]


VALUES = [torch.tensor([0.5, 9.0, -0.25]), torch.zeros(3), torch.ones(3), torch.tensor([0.0, 0.0, 0.75])]


def same(one, other):
    return all(torch.equal(torch.cat(a), torch.cat(b)) for a, b in zip(one, other, strict=True))


def test_the_table_is_what_a_workflow_may_name():
    assert set(ESTIMATORS) == set(get_args(Algorithm.model_fields["estimator"].annotation))


def test_a_workflows_algorithm_reaches_the_estimator(make_row):
    rows = rows_of(make_row)
    batch = CreditBatch.from_rows(rows)
    options = {"group_by": ("uid", "turn"), "stat_unit": "trajectory", "center": "leave_one_out", "scale": "none"}
    assert same(estimate("grpo", rows, Algorithm(**options)), group_relative(batch, **options))
    assert not same(estimate("grpo", rows, Algorithm(**options)), group_relative(batch))
    assert same(estimate("reinforce_pp", rows, Algorithm(gamma=0.5)), reinforce_pp(batch, gamma=0.5))
    assert not same(estimate("reinforce_pp", rows, Algorithm(gamma=0.5)), reinforce_pp(batch))
    batch = CreditBatch.from_rows(rows, values=VALUES)
    options = {"gamma": 0.9, "lam": 0.5, "whiten": False}
    for name, estimator in (("gae", gae), ("gae_chain", gae_chain)):
        found = estimate(name, rows, Algorithm(**options), values=VALUES)
        assert same(found, estimator(batch, **options)) and not same(found, estimator(batch))


def test_the_schemas_defaults_are_the_estimators(make_row):
    rows = rows_of(make_row)
    for name in ESTIMATORS:
        plain = estimate(name, rows, SimpleNamespace(), values=VALUES)
        assert same(estimate(name, rows, Algorithm(), values=VALUES), plain)


def test_unknown_estimator(make_row):
    with pytest.raises(UserError, match="'vtrace' is unknown.*grpo, reinforce_pp"):
        estimate("vtrace", rows_of(make_row), Algorithm())


def test_estimators_change_nothing_in_the_rows(make_row):
    rows = rows_of(make_row)
    for name in ESTIMATORS:
        estimate(name, rows, Algorithm(), values=VALUES)
    assert rows == rows_of(make_row)


def test_credit_needs_neither_verl_nor_ray():
    code = "import sys, recipe.dag.credit.estimator; print(sorted({'verl', 'ray', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
