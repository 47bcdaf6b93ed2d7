"""The plugin that measures tests: its order, its halves, its sums and its budgets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
PLUGIN = Path(__file__).with_name("costs.py")


@pytest.fixture
def suite(pytester):
    """A suite of four files with two tests each, and the plugin."""
    shutil.copy(PLUGIN, pytester.path / "costs.py")
    pytester.syspathinsert()
    for name in "abcd":
        mark = "import pytest\npytestmark = pytest.mark.slow\n" if name == "d" else ""
        body = f"{mark}def test_one(): sum(range(10**6))\ndef test_two(): pass\n"
        folder = pytester.mkdir(name)
        (folder / f"test_{name}.py").write_text(body)

    def run(*arguments: str) -> tuple[list[str], str, int]:
        options = ("-p", "costs", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "markers=slow: slow", "-v")
        done = pytester.runpytest_subprocess(*options, *arguments)
        names = [line.partition(" ")[0] for line in done.outlines if "PASSED" in line]
        return names, done.stdout.str(), done.ret

    run.budgets = pytester.path / "budgets.json"
    return run


def test_both_halves_are_the_whole_in_any_order(suite):
    every, _, code = suite()
    assert code == 0 and len(every) == 8 and every[0].startswith("d/")  # slow files come first
    halves = [suite("--half", half)[0] for half in ("1", "2")]
    assert sorted(halves[0] + halves[1]) == sorted(every) and not set(halves[0]) & set(halves[1])
    orders = [suite("--shuffle", seed)[0] for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2]) == sorted(every)


def test_a_run_over_its_budgets_fails_and_says_by_how_much(suite):
    _, text, code = suite("--budgets", "write")
    assert code == 0 and "spent 1.00 of the budgets" in text and "the twenty slowest tests" in text
    spent = json.loads(suite.budgets.read_text())
    assert set(spent) == set("abcd") and all(seconds >= 1 for seconds in spent.values())
    suite.budgets.write_text(json.dumps({"a": 1}))
    _, text, code = suite("--budgets", "check")
    assert code == 1 and "spent 4.00 of the budgets" in text and "budget     0, spent     1" in text
