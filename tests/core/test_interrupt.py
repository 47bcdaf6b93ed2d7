"""Signals, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys, time
from recipe.dag.core.interrupt import Interrupted, Interruption, Stopped

async def trains(stop):
    stop.take_notice()
    print("ready", flush=True)
    try:
        await stop.until_asked(asyncio.sleep(60))
    except Stopped:
        await asyncio.sleep(0.2)
        print("saved")
        return "stopped"

async def starts(stop):
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up")

async def blocks(stop):
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)

async def library(stop):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop.install()
    await starts(stop)

async def ray_starts(stop):
    import signal
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
    print("ready", flush=True)
    while True:
        time.sleep(0.05)

async def exits(stop):
    print("ready", flush=True)
    sys.exit(3)

with Interruption() as stop:
    try:
        if sys.argv[1] == "imports":
            print("ready", flush=True)
            time.sleep(60)
        print(asyncio.run(stop.run(globals()[sys.argv[1]](stop))), stop.asked)
    except Interrupted as error:
        print(f"interrupted by {error}")
        sys.exit(error.exit_code)
"""


def run(part: str, *numbers: int) -> tuple[int, list[str]]:
    """The exit code and the output of a part of the program that gets signals once it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, part],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a shell's background job ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
            while process.poll() is None and Path(f"/proc/{process.pid}/status").exists() and pending(process.pid):
                pass
        output = process.communicate(timeout=60)[0]
    return process.returncode, output.splitlines()


def pending(pid: int) -> bool:
    """Whether a signal sent has not been taken yet."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return int(fields.get("ShdPnd", "0"), 16) != 0


@pytest.mark.parametrize(
    ("part", "number", "code", "output"),
    [
        # what is under way is given up and cleans up
        ("starts", signal.SIGINT, 130, ["cleaned up", "interrupted by SIGINT"]),
        ("starts", signal.SIGTERM, 143, ["cleaned up", "interrupted by SIGTERM"]),
        ("library", signal.SIGINT, 130, ["cleaned up", "interrupted by SIGINT"]),
        ("library", signal.SIGTERM, 143, ["cleaned up", "interrupted by SIGTERM"]),
        # while Ray starts, which has a handler of its own; another exit is none
        ("ray_starts", signal.SIGTERM, 143, ["interrupted by SIGTERM"]),
        ("exits", None, 3, []),
        # before the event loop
        ("imports", signal.SIGINT, 130, ["interrupted by SIGINT"]),
        ("imports", signal.SIGTERM, 143, ["interrupted by SIGTERM"]),
        # training ends in order, or is given up
        ("trains", signal.SIGTERM, 0, ["saved", "stopped True"]),
        ("trains", signal.SIGINT, 130, ["interrupted by SIGINT"]),
    ],
)
def test_a_signal_ends_what_is_under_way(part, number, code, output):
    assert run(part, *([] if number is None else [number])) == (code, output)


def test_a_second_signal_ends_at_once_even_while_the_event_loop_is_blocked():
    # in the order in which Python handles signals that arrive together
    assert run("blocks", signal.SIGINT, signal.SIGTERM) == (143, ["ended immediately by a second signal"])
