"""pass@k from files: both forms are read, errors are apart, intervals and paired differences are right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from recipe.dag.app.cli import app
from recipe.dag.core.errors import UserError
from recipe.dag.report.pass_table import Graded, difference, intervals, read_graded, table


def episode(correct, index=None, error=None):
    item = {"metrics": {"is_correct": correct}} if error is None else {"error": error}
    return item | ({} if index is None else {"sample_index": index})


def test_this_projects_results_are_grouped_by_problem(tmp_path):
    items = [episode(True, 0), episode(False, 1), episode(None, 0), episode(True, 1), episode(None, 0, "env fault")]
    (tmp_path / "results.json").write_text(json.dumps(items))
    assert read_graded(tmp_path) == Graded({"0": [True, False], "1": [True]}, errors=1)


def test_one_episode_per_problem(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps([episode(True), episode(False)]))
    assert read_graded(tmp_path).problems == {"0": [True], "1": [False]}


def test_the_published_form(tmp_path):
    items = [
        {"problem_id": 7, "sample_id": 0, "correct": True},
        {"problem_id": 3, "sample_id": 0, "correct": False},
        {"problem_id": 7, "sample_id": 1, "correct": False, "error": "request timed out"},
    ]
    file = tmp_path / "aime.json"
    file.write_text(json.dumps({"metadata": {}, "results": items}))
    assert read_graded(file) == Graded({"7": [True], "3": [False]}, errors=1)


@pytest.mark.parametrize("text", ["[]", "{}", "[1]", "not json"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results\.json"):
        read_graded(tmp_path)


def test_intervals_hold_the_mean_and_shrink_with_more_problems():
    few = Graded({str(n): [n % 2 == 0] * 2 for n in range(10)}, 0)
    many = Graded({str(n): [n % 2 == 0] * 2 for n in range(1000)}, 0)
    small, large = intervals(few, [1, 2, 3]), intervals(many, [1])
    assert set(small) == {1, 2}
    assert small[1].low < small[1].value == 0.5 < small[1].high
    assert large[1].high - large[1].low < (small[1].high - small[1].low) / 5


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 1), (8, 4)])
@pytest.mark.parametrize("mean", [0.05, 0.3, 0.97])
@pytest.mark.parametrize("spread", [0.5, 20.0])
def test_intervals_cover_the_truth(n, k, mean, spread):
    """30 problems whose chances are Beta-distributed; `spread`: from all or nothing to almost equal ones. The second
    evaluation keeps 70 % of each chance."""
    rng, shape = np.random.default_rng(0), (mean * spread, (1 - mean) * spread)

    def graded(chances):
        counts = rng.binomial(n, chances)
        return Graded({str(p): [True] * c + [False] * (n - c) for p, c in enumerate(counts.tolist())}, 0)

    truth = mean if k == 1 else 1 - ((1 - rng.beta(*shape, 100_000)) ** k).mean()
    covered = [0, 0]
    for _ in range(1000):
        chances = rng.beta(*shape, 30)
        first = graded(chances)
        interval, gain = intervals(first, [k])[k], difference(first, graded(chances * 0.7), 1)
        covered[0] += interval.low <= truth <= interval.high
        covered[1] += gain.low <= -0.3 * mean <= gain.high
    assert min(covered) >= 930


def test_all_solved_has_a_width():
    solved = Graded({str(p): [True] * 4 for p in range(30)}, 0)
    found = intervals(solved, [1])[1]
    assert found.value == found.high == 1.0 and found.low == pytest.approx(1 / (1 + 2.045**2 / 30), abs=1e-3)
    same = difference(solved, solved, 1)
    assert -0.1 < same.low < same.value == 0.0 < same.high < 0.1


def test_a_paired_difference_sees_what_separate_intervals_cannot():
    first = Graded({str(n): [n % 2 == 0] * 4 for n in range(40)}, 0)
    second = Graded({str(n): [n % 2 == 0 or n % 8 == 1] * 4 for n in range(40)}, 0)
    gain = difference(first, second, 1)
    assert gain.value == pytest.approx(0.125) and gain.low > 0
    assert intervals(first, [1])[1].high > intervals(second, [1])[1].low
    assert difference(first, Graded({"other": [True]}, 0), 1) is None


def test_the_command(tmp_path):
    for name, correct in (("a", False), ("b", True)):
        (tmp_path / name).mkdir()
        items = [episode(correct or index == 0, index) for _ in range(3) for index in range(4)]
        (tmp_path / name / "results.json").write_text(json.dumps(items))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    printed = CliRunner().invoke(app, ["pass-at-k", *folders]).output
    assert "3 problems, 12 graded, 0 errors" in printed and "pass@4    1.0000" in printed
    assert "pass@1    +0.7500  [-" in printed
    figures = json.loads(CliRunner().invoke(app, ["pass-at-k", *folders, "--k", "1,2", "--json"]).output)
    assert figures == table([tmp_path / "a", tmp_path / "b"], [1, 2])
    assert list(figures["difference"]) == ["1", "2"]
