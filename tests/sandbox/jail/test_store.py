"""The process that keeps the sessions' file systems: what it mounts, what it takes down, and its death."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from recipe.sandbox import descent
from recipe.sandbox.job import Job
from recipe.sandbox.outcome import SandboxError


def store_of(box) -> int:
    """Return the number of the process whose namespace has the mounts."""
    (store,) = descent.children(box.engine.store._keeper._helper.number())
    return store


def mounted(box) -> list[str]:
    with open(f"/proc/{store_of(box)}/mountinfo") as file:
        return [line for line in file if " /tmp/" in line and " - tmpfs " in line]


def settled(box, count: int) -> bool:
    """Return whether the store has that many file systems within some seconds."""
    for _ in range(500):
        if len(mounted(box)) == count:
            return True
        box.wait(asyncio.sleep(0.02))
    return False


def test_a_removed_session_leaves_no_mount_and_no_memory(box):
    assert settled(box, 0)
    with box.session() as place:
        box.run("open('f', 'wb').write(bytes(8 << 20))", work=place)
        assert box.wait(place.used()) == 8 << 20
        (mount,) = mounted(box)
        assert "nosuid,nodev" in mount and "size=16384k,nr_inodes=1024,mode=700" in mount
    assert settled(box, 0)


def test_the_file_system_bounds_bytes_and_entries(box):
    with box.session(quota_mb=1) as place:
        code = "try: open('f', 'wb').write(bytes(2 << 20))\nexcept OSError as error: print(error.errno)"
        assert box.run(code, work=place).run.stdout == "28\n"
        code = "import os\nos.unlink('f')\ntry:\n  for n in range(10**6): os.mkdir(str(n))\nexcept OSError: print(n)"
        assert box.run(code, work=place).run.stdout == "999\n"


def test_a_session_outlives_its_removal_during_a_call(box):
    async def remove() -> str:
        place = await box.engine.store.create(1 << 20)
        code = "import time; print('begun'); time.sleep(1); open('f', 'w').write('kept'); print(open('f').read())"
        work = asyncio.create_task(box.engine.execute(Job(code, timeout_s=30, work=place)))
        assert await box.printed(work)
        place.remove()
        return (await work).run.stdout

    assert box.wait(remove()) == "begun\nkept\n"
    assert settled(box, 0)


def test_cancelled_requests_leave_nothing(box):
    async def cancel() -> None:
        creating = [asyncio.create_task(box.engine.store.create(1 << 20)) for _ in range(20)]
        await asyncio.sleep(0)
        for task in creating[::2]:
            task.cancel()
        places = await asyncio.gather(*creating, return_exceptions=True)
        for place in places[1::2]:
            lending = asyncio.create_task(place.for_job(read_only=True))
            await asyncio.sleep(0)
            lending.cancel()
            await asyncio.wait([lending])
            place.remove()

    box.wait(cancel())
    assert settled(box, 0)


def test_a_store_that_dies_loses_its_sessions_and_is_replaced(box):
    with box.session() as old:
        os.kill(store_of(box), signal.SIGKILL)
        with pytest.raises(SandboxError, match="lost"):
            while True:
                box.run("print(1)", work=old)
        assert old.lost and box.run("print(1)").run.stdout == "1\n"
        with box.session() as new:
            assert box.run("open('f', 'w').write('x'); print(open('f').read())", work=new).run.stdout == "x\n"
