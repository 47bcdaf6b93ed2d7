"""Signals, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import asyncio, sys, time
from recipe.dag.interrupt import Interrupted, Interruption, Stopped

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
        output = process.communicate(timeout=30)[0]
    return process.returncode, output.splitlines()


def pending(pid: int) -> bool:
    """Whether a signal sent has not been taken yet."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return int(fields.get("ShdPnd", "0"), 16) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", ["starts", "library"])
def test_a_signal_gives_up_what_is_under_way_and_cleans_up(part, number):
    assert run(part, number) == (128 + number, ["cleaned up", f"interrupted by {number.name}"])


def test_sigterm_while_ray_starts_is_an_interruption_and_another_exit_is_none():
    assert run("ray_starts", signal.SIGTERM) == (143, ["interrupted by SIGTERM"])
    assert run("exits") == (3, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_event_loop_ends_at_once(number):
    assert run("imports", number) == (128 + number, [f"interrupted by {number.name}"])


def test_sigterm_lets_training_end_in_order():
    assert run("trains", signal.SIGTERM) == (0, ["saved", "stopped True"])


def test_sigint_gives_training_up():
    assert run("trains", signal.SIGINT) == (130, ["interrupted by SIGINT"])


def test_a_second_signal_ends_at_once_even_while_the_event_loop_is_blocked():
    # in the order in which Python handles signals that arrive together
    assert run("blocks", signal.SIGINT, signal.SIGTERM) == (143, ["ended immediately by a second signal"])
