"""Estimators of the user's own: what they are given, what may come back, and what is said of everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.episode.load import load_user_code
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.user_files import user_files

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_estimator" / "workflow_by_mean.yaml"
WORKFLOW = """\
dag_id: own
agents: [{{name: solver, policy: main}}]
policies: {{main: {{model: {{path: here}}{policy}}}}}
algorithm: {{{algorithm}}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, reward: own.py:score, after: solve}}
"""
CODE = """
import torch

def score(episode):
    return {}

def plain(batch, *, factor=1.0):
    return [factor * reward for reward in batch.rewards.tolist()]

def per_token(batch):
    rows = [torch.arange(length, dtype=torch.float64) for length in batch.row_lengths]
    return rows, batch.rewards

def critical(batch):
    return batch.values.split(list(batch.row_lengths))[0].sum().expand(len(batch.uid))

def broken(batch):
    return 1 / 0

class Own:
    def __init__(self, shift=0.0):
        self.shift = shift

    def credit(self, batch):
        return batch.rewards + self.shift
"""


@pytest.fixture
def own(tmp_path):
    """Writes own.py (with `more`) and loads a workflow beside it."""

    def load(algorithm: str, more: str = "", policy: str = ""):
        (tmp_path / "own.py").write_text(CODE + more)
        (tmp_path / "workflow.yaml").write_text(WORKFLOW.format(algorithm=algorithm, policy=policy))
        return load_workflow(tmp_path / "workflow.yaml")

    return load


@pytest.fixture
def rows(make_row):
    return [make_row(reward, episode=e, mask=(1, 0, 1)) for e, reward in enumerate((1.0, -0.5))]


def advantages(workflow, rows, **more):
    found, returns = estimate(workflow.algorithm, rows, base=workflow.path, **more)
    return [tokens.tolist() for tokens in found], [tokens.tolist() for tokens in returns]


def test_numbers_of_calls_reach_their_sampled_tokens_and_the_rewards_are_the_returns(own, rows):
    found, returns = advantages(own("estimator: 'own.py:plain', estimator_kwargs: {factor: 2}"), rows)
    assert found == [[2.0, 0.0, 2.0], [-1.0, 0.0, -1.0]] and returns == [[1.0, 0.0, 1.0], [-0.5, 0.0, -0.5]]
    found, _ = advantages(own("estimator: 'own.py:Own', estimator_kwargs: {shift: 0.25}"), rows)
    assert found == [[1.25, 0.0, 1.25], [-0.25, 0.0, -0.25]]


@pytest.mark.parametrize("body", ["np.array([2.0, -1.0])", "(2.0, -1.0)", "batch.rewards * 2", "torch.tensor([2, -1])"])
def test_numbers_come_in_any_container(own, rows, body):
    workflow = own("estimator: 'own.py:f'", more=f"\nimport numpy as np\n\ndef f(batch):\n    return {body}\n")
    assert advantages(workflow, rows)[0] == [[2.0, 0.0, 2.0], [-1.0, 0.0, -1.0]]


@pytest.mark.parametrize(
    ("more", "ref", "what"),
    [
        ("import nonexistent_module", "own.py:plain", "cannot be loaded: .*nonexistent_module"),
        ("async def late(batch): ...", "own.py:late", "must be a function, not async"),
        ("K = 3", "own.py:K", "must be a function, not async, or a class"),
    ],
)
def test_code_that_cannot_be_loaded_is_found_before_a_run_starts(own, more, ref, what):
    workflow = own(f"estimator: '{ref}'", more=f"\n{more}\n")
    with pytest.raises(UserError, match=what):
        load_user_code(workflow)


def test_numbers_of_tokens_stay_where_they_are_and_masked_tokens_get_none(own, rows):
    found, returns = advantages(own("estimator: 'own.py:per_token'"), rows)
    assert found == [[0.0, 0.0, 2.0]] * 2 and returns[0] == [1.0, 0.0, 1.0]


def test_a_critic_is_optional_and_its_values_are_there(own, rows):
    workflow = own("estimator: 'own.py:critical'", policy=", critic: {}")
    found, _ = advantages(workflow, rows, values=[torch.full((3,), 0.5)] * 2)
    assert found == [[1.0, 0.0, 1.0]] * 2
    assert "main.values" in [node.id for node in workflow.training_nodes]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "[1.0]",
            r"one number for each of the 2 calls, or a list of one tensor for each of the 2 rows, not list \[1.0\]",
        ),
        ("None", "not NoneType None"),
        ("'ab'", "not str 'ab'"),
        ("['a', 'b']", "not list"),
        ("[float('nan'), 1.0]", "returned advantages that are not finite"),
        ("([1.0, 1.0], [1.0])", "must return returns as one number"),
        ("[torch.zeros(2), torch.zeros(3)]", "a list of one tensor for each of the 2 rows"),
        ("torch.zeros(2, 1)", "one number for each of the 2 calls"),
        ("[torch.zeros(3), 1.0]", "one number for each of the 2 calls"),
        ("[10 ** 400, 1.0]", "one number for each of the 2 calls"),
    ],
)
def test_what_it_may_not_return_is_one_line(own, rows, body, message):
    workflow = own("estimator: 'own.py:wrong'", more=f"\ndef wrong(batch):\n    return {body}\n")
    with pytest.raises(UserError, match=message) as error:
        advantages(workflow, rows)
    assert str(error.value).startswith("algorithm.estimator: own.py:wrong") and "\n" not in str(error.value)


def test_what_it_raises_is_one_line_with_its_place(own, rows):
    with pytest.raises(UserError, match=r"own.py:broken: ZeroDivisionError: division by zero \(.*own.py:18\)"):
        advantages(own("estimator: 'own.py:broken'"), rows)


@pytest.mark.parametrize(
    ("algorithm", "where", "what"),
    [
        ("estimator: 'own.py:plane'", "algorithm.estimator", "did you mean `plain`"),
        ("estimator: 'other.py:plain'", "algorithm.estimator", "other.py"),
        ("estimator: 'own.py:plain', estimator_kwargs: {scale: 2}", "algorithm.estimator_kwargs.scale", "scale"),
        ("estimator: 'own.py:Own', estimator_kwargs: {by: 2}", "algorithm.estimator_kwargs.by", "__init__"),
        ("estimator: 'own.py:plain', lam: 0.5", "algorithm.lam", "does not use this option"),
        ("estimator: 'own.py:plain', drop_zero_variance: true", "algorithm.drop_zero_variance", "compares no groups"),
        ("estimator_kwargs: {scale: 2}", "algorithm.estimator_kwargs", "(only file.py:function)"),
        ("estimator: own.py", "algorithm.estimator", "`file.py:function`"),
    ],
)
def test_mistakes_are_found_without_running_the_file(own, algorithm, where, what):
    with pytest.raises(WorkflowError) as error:
        own(algorithm, more="\nraise SystemExit('this file must not run')\n")
    assert len(error.value.problems) == 1 and where in str(error.value) and what in str(error.value)


def test_its_file_is_one_of_the_runs_files(own):
    assert list(user_files(own("estimator: 'own.py:plain'"))) == ["own.py"]


def test_the_example_does_what_it_says(make_row):
    workflow = load_workflow(EXAMPLE)
    rows = [
        make_row(r, uid=uid, episode=e)
        for uid, rs in (("a", (1, 0, 0, 0)), ("b", (1, 1, 1, 0)))
        for e, r in enumerate(rs)
    ]
    found, _ = estimate(workflow.algorithm, rows, base=workflow.path)
    assert [round(tokens[0].item(), 6) for tokens in found[:2]] == [3.0, -1.0]
    assert round(found[4][0].item(), 6) == round(1 / 3, 6)
    shrunk = make_algorithm("estimator.py:Shrunk", estimator_kwargs={"trust": 1.0})
    assert [tokens[0].item() for tokens in estimate(shrunk, rows, base=str(EXAMPLE))[0]] == [
        row.calls[0].reward - 0.5 for row in rows
    ]
