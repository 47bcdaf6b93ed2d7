"""One engine of each kind for all tests of the jail, and the checks after each of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipe.sandbox import descent, engines
from recipe.sandbox.jail.run import Run
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import Execution, Unavailable
from recipe.sandbox.places import Place

PATIENCE_S = 60.0


class Box:
    """An engine on a private event loop, which runs only during calls."""

    def __init__(self, name: str, root: Path):
        self.name = name
        self.root = root
        self.loop = asyncio.new_event_loop()
        self.engine = self.wait(engines.start(name, False, root=root))
        with self.session():
            pass  # starts the store, which would count as a leak

    def wait(self, work):
        return self.loop.run_until_complete(work)

    def run(self, code: str, *, timeout_s: float = 60.0, **options) -> Execution:
        return self.wait(self.engine.execute(Job(code, timeout_s=timeout_s, **options)))

    def run_out(self, code: str, *, timeout_s: float, printed: int = 1, **options) -> Execution:
        """Run a program until its time-out, before which it prints so many characters: on a busy machine it gets
        longer."""
        execution = self.run(code, timeout_s=timeout_s, **options)
        while len(execution.run.stdout) < printed and timeout_s < 60:
            execution = self.run(code, timeout_s=(timeout_s := 4 * timeout_s), **options)
        return execution

    def many(self, codes: list[str], *, timeout_s: float = 60.0, **options) -> list[Execution]:
        async def together() -> list[Execution]:
            jobs = (Job(code, timeout_s=timeout_s, **options) for code in codes)
            return await asyncio.gather(*map(self.engine.execute, jobs))

        return self.wait(together())

    async def printed(self, task: asyncio.Task) -> Run | None:
        """Wait until the only program, which `task` executes, has printed; return its run, None if it ended first."""
        while not task.done():
            if (run := next(iter(self.engine._running), None)) and run._pumps[0]._kept:
                return run
            await asyncio.sleep(0.01)
        return None

    @contextmanager
    def session(self, quota_mb: int = 16) -> Iterator[Place]:
        """Yield the directory of a new session."""

        async def remove() -> None:
            place.remove()

        place = self.wait(self.engine.store.create(quota_mb << 20))
        try:
            yield place
        finally:
            self.wait(remove())

    def counts(self) -> dict[str, int]:
        """Return the counts that a leak would increase."""
        with open("/proc/self/mounts") as mounts:
            return {
                "processes": len(descent.descendants(os.getpid())),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "mounts": len(mounts.readlines()),
                "files": sum(len(files) + len(folders) for _, folders, files in os.walk(self.root)),
            }

    def full(self) -> bool:
        """Return whether all jails that wait for jobs exist, with both processes: later ones would count as leaks."""
        kinds = self.engine.status().get("zygotes", {}).values()
        jails = [jail for pool in getattr(self.engine, "_pools", {}).values() for jail in pool._waiting]
        return all(kind["waiting"] >= kind["ahead"] for kind in kinds) and all(
            descent.children(jail.number()) for jail in jails
        )

    def settle(self, wanted: dict[str, int] | None = None) -> dict[str, int]:
        """Wait until no count is above `wanted`, or until they stop changing, or for PATIENCE_S; return them."""
        seen, deadline = [], time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.wait(asyncio.sleep(0.01))
            counts = self.counts()
            # A jail that has just been made may take some time until it forks.
            seen = [*seen[-9:], counts]
            unchanged = len(seen) == 10 and all(earlier == counts for earlier in seen)
            settled = all(counts[name] <= wanted[name] for name in counts) if wanted else unchanged
            if settled and self.full():
                break
        return counts

    def close(self) -> None:
        self.wait(self.engine.close())
        self.loop.close()


@pytest.fixture(scope="session")
def boxes(tmp_path_factory):
    made: dict[str, Box | str] = {}
    yield made
    for box in made.values():
        if isinstance(box, Box):
            box.close()


@pytest.fixture
def box_of(boxes, tmp_path_factory):
    def get(name: str) -> Box:
        if name not in boxes:
            try:
                boxes[name] = Box(name, tmp_path_factory.mktemp(name))
            except Unavailable as reason:
                boxes[name] = str(reason)
        if isinstance(boxes[name], str):
            pytest.skip(boxes[name])
        return boxes[name]

    return get


def _unharmed(box: Box):
    """After the test, the next call is answered soon and nothing is left behind. Lower counts are not leaks:
    processes of an earlier test may have ended since."""
    before = box.settle()
    yield box
    took = []
    while not took or (min(took) >= 1.0 and sum(took) < PATIENCE_S):  # the machine may be busy for a while
        started = time.monotonic()
        assert box.run("print(6 * 7)").run.stdout == "42\n"
        took.append(time.monotonic() - started)
    assert min(took) < 1.0
    assert not {name: count for name, count in box.settle(before).items() if count > before[name]}


@pytest.fixture
def box(box_of):
    yield from _unharmed(box_of("full"))
