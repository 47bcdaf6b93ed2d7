"""What the tests cost: a pytest plugin that prints the slowest tests and the sum of each folder, and holds a whole run
to `budgets.json`.

Costs are CPU seconds, of the process that runs a test, of the processes that it waited for, and of the zygote's
children that worked for it (the workers of the shared Ray count when they end, for the process that started it); those
of a machine whose calibration loop takes 0.1 s. So a busy machine changes little and a slow one nothing. A whole run
fails when its sum is more than 1.5 times the budgets'.

`--shuffle SEED` runs the files, and the tests of a file, in another order; `--half 1` and `--half 2` run the two halves
of the suite.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

BUDGETS = Path(__file__).with_name("budgets.json")
TOLERANCE = 1.5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and tests within files, in a random order")
    parser.addoption("--half", type=int, choices=(1, 2), help="run every second file")
    parser.addoption("--budgets", choices=("check", "write"), help="hold the run to budgets.json, or write the file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "costs of tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle; otherwise begin with the slow files, so that no process is left with one when the others are done, and
    take these from one folder after the other, since the files of a folder wait for what the first of them makes."""
    if seed := config.getoption("--shuffle"):
        rng = random.Random(seed)
        rank = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
        rng.shuffle(items)
        items.sort(key=lambda item: rank[item.path])
    else:
        turns: dict[Path, int] = {}
        for path in dict.fromkeys(item.path for item in items if item.get_closest_marker("slow")):
            turns[path] = sum(other.parent == path.parent for other in turns)
        items.sort(key=lambda item: turns.get(item.path, len(turns)))
    if half := config.getoption("--half"):
        kept = set(list(dict.fromkeys(item.path for item in items))[half - 1 :: 2])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
        items[:] = [item for item in items if item.path in kept]


class Costs:
    """Seconds of each test, and CPU seconds of each folder."""

    def __init__(self, config: pytest.Config):
        self.config, self.shuffle = config, config.getoption("--shuffle")
        self.seconds: dict[str, float] = defaultdict(float)
        self.folders: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.zygote: Path | None = None
        self._last = 0.0

    def pytest_collection_finish(self) -> None:
        self._last = self.cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        before, self._last = self._last, self.cpu_seconds()
        report.cpu_seconds = self._last - before  # travels to the process that prints
        return report

    def cpu_seconds(self) -> float:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages) + self._of_the_zygote()

    def _of_the_zygote(self) -> float:
        if self.zygote is None:
            return 0.0
        spent = (self.zygote / "spent").glob(f"{os.environ.get('PYTEST_XDIST_WORKER', 'master')}.*")
        return sum(float(file.read_text() or 0) for file in spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        self.seconds[report.nodeid] += report.duration
        self.folders[folder] += getattr(report, "cpu_seconds", 0.0)
        self.tests[folder].add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput") or not (wanted := self.config.getoption("--budgets")):
            return
        scale = 0.1 / calibration()
        spent = {folder: math.ceil(seconds * scale) for folder, seconds in sorted(self.folders.items())}
        if wanted == "write":
            BUDGETS.write_text(json.dumps(spent, indent=2) + "\n")
        self.budgets = json.loads(BUDGETS.read_text()) if BUDGETS.is_file() else {}
        self.spent = spent
        if exitstatus == 0 and sum(spent.values()) > TOLERANCE * sum(self.budgets.values()) > 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) < 1000 and not self.config.getoption("--budgets"):
            return
        write = terminalreporter.write_line
        terminalreporter.section("the twenty slowest tests (seconds)")
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])[:20]:
            write(f"{seconds:7.1f}  {name}")
        terminalreporter.section("CPU seconds of each folder")
        budgets = getattr(self, "budgets", {})
        for folder, seconds in sorted(self.folders.items(), key=lambda item: -item[1]):
            spent = f", budget {budgets.get(folder, 0):5}, spent {self.spent[folder]:5}" if budgets else ""
            write(f"{seconds:7.1f}  {folder}: {len(self.tests[folder])} tests{spent}")
        write(f"{sum(self.folders.values()):7.1f}  in all, {sum(map(len, self.tests.values()))} tests")
        if budgets:
            share = sum(self.spent.values()) / sum(budgets.values())
            verdict = f"; it fails above {TOLERANCE}: make tests cheaper, or state the price in {BUDGETS.name}"
            write(f"spent {share:.2f} of the budgets (CPU seconds of a machine that calibrates in 0.1 s){verdict}")
        if self.shuffle:
            write(f"in the order of --shuffle {self.shuffle}")


def folder_of(nodeid: str) -> str:
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def calibration() -> float:
    """Return the CPU seconds of a fixed amount of work: the least of five."""

    def once() -> float:
        start = time.process_time()
        sum(i * i % 7 for i in range(1_000_000))
        return time.process_time() - start

    return min(once() for _ in range(5))
