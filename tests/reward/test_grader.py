r"""The grader's verdicts, and that a worker which hangs or dies is a fault and not a verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward import grader
from recipe.dag.reward.grader import GraderPool, Undecided

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    shared = GraderPool()
    yield shared
    shared.shutdown()


POISON = (r"(x+1)^{500}(x+2)^{500}", "x^2+1")
"""Takes sympy far longer than anyone waits, and nothing in its spelling gives it away."""
RIGHT = [
    ("27", "27.0"),
    (r"\frac{9}{5}", r"1\frac{4}{5}"),
    ("137.5", r"137 \frac{1}{2}"),
    ("0.333333", r"\frac13"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("sqrt(8)", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("2*pi", r"2\pi"),
    ("x**2 - 1", "(x-1)(x+1)"),
    ("1+2x", "2x+1"),
    (r"\{2, 1\}", r"\{1,2\}"),
    ("2, 1", "1,2"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1+\sqrt{5}, 1-\sqrt{5}\}"),
    ("( 3 , 1/2 )", r"\left(3, \frac{1}{2}\right)"),
    (r"[-2,7]", r"x \in [-2,7]"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    ("5", "x=5"),
    ("y = 3 + 2x", "y = 2x + 3"),
    (r"\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    ("C", r"\text{(C)}"),
    ("evelyn", r"\text{Evelyn}"),
    ("5.4", r"5.4 \text{ cents}"),
    ("10^{-3}", "0.001"),
    ("6-5i", "-5i + 6"),
    ("50 percent", r"50\%"),
    (r"50\text{ percent}", r"50\%"),
    ("5 dollars", r"\$5"),
    ("=5", "5"),
    ("5,", "5"),
    ("5;", "5"),
    (r"=\sqrt{8},", r"2\sqrt{2}"),
    ("2 1/2", r"2\frac{1}{2}"),
    ("-2 1/2", "-2.5"),
    ("2 1/2", "2+1/2"),
    (r"52_{8}", "52_8"),
    (r"5\text{ cm}^{2}", r"5 \mathrm{~cm}^2"),
    (r"5\text{ cm}^2", r"5\text{ square centimeters}"),
    (r"[0,\infty)", r"\left[0,\infty\right)"),
    (r"5\,", "5"),
]
WRONG = [
    ("26", "27.0"),
    ("0.33", r"\frac13"),
    (r"2\sqrt{3}", r"2\sqrt{2}"),
    ("x^2+1", "(x-1)(x+1)"),
    (r"\{1,3\}", r"\{1,2\}"),
    ("(2,1)", "(1,2)"),
    ("[0,1)", "(0,1)"),
    ("(0,9)", r"(0,9) \cup (9,36)"),
    ("q - p", "p - q"),
    ("B", r"\text{(C)}"),
    ("6+5i", "6-5i"),
    ("52_8", "52_9"),
    (r"52_{8}", "52_{9}"),
    (r"5\text{ m}^2", r"5\text{ m}^3"),
    (r"5 \mathrm{~m}^2", r"5\text{ m}"),
    (r"[0,\infty]", r"[0,\infty)"),
    (r"(0,\infty)", r"(0,\infty]"),
    (r"\left[-\infty,3\right]", r"(-\infty,3]"),
    (r"(-\infty,2)\cup[3,\infty]", r"(-\infty,2)\cup[3,\infty)"),
    ("2 1/2", "21/2"),
    ("2 1/2", "1"),
    ("50 percent", "5"),
    (r"\infty", "10"),
    ("", "3"),
    (" ", "x"),
    ("1/0", "2"),
    ("any text that is no mathematics", "4"),
    (r"\ud800 \frac{", r"\frac{1}{2}x"),
    ("\ud800", "x"),
    ("a\0b", "x"),
    ("((((" * 100, "x"),
    ("__import__('os').system('exit 1')", "x"),
]


@pytest.mark.parametrize(("prediction", "truth"), RIGHT)
def test_right_answers(pool, prediction, truth):
    assert asyncio.run(pool.grade(prediction, truth)) is True


@pytest.mark.parametrize(("prediction", "truth"), WRONG, ids=lambda text: repr(text)[:30])
def test_wrong_answers(pool, prediction, truth):
    assert asyncio.run(pool.grade(prediction, truth, timeout_s=60.0)) is False


def test_easy_and_hopeless_pairs_start_no_worker():
    pool = GraderPool(command=["/bin/false"])
    assert asyncio.run(pool.grade("1/2", "0.5")) is True
    assert asyncio.run(pool.grade("9^{9^{9^9}}", "x")) is False
    assert pool.counters == {"graded": 2, "quick": 1, "hopeless": 1}
    pool.shutdown()


def test_poison_is_wrong_after_two_attempts_and_the_next_call_works():
    """A fault would have the episode sampled again: a second attempt that the text itself buys."""
    pool = GraderPool()

    async def scenario() -> None:
        assert await pool.grade("1+2x", "2x+1", timeout_s=60)
        first = pool._workers[0]._process.pid
        assert await pool.grade(*POISON, timeout_s=0.5) is False
        assert not Path(f"/proc/{first}").exists()
        with pytest.raises(Undecided, match=r"timeout, limit 0\.5 s"):
            await pool.decide(*POISON, timeout_s=0.5)
        assert await pool.grade("1+2x", "2x+1", timeout_s=60)

    asyncio.run(scenario())
    assert pool.counters == {"graded": 4, "symbolic": 2, "timeouts": 4, "undecided": 2}
    asyncio.run(pool.close())


def test_a_worker_that_was_killed_is_replaced_and_the_comparison_repeated():
    pool = GraderPool()

    async def scenario() -> None:
        assert await pool.grade("1+2x", "2x+1", timeout_s=60)
        os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
        assert await pool.grade("2+2x", "2x+2", timeout_s=60)

    asyncio.run(scenario())
    assert pool.counters == {"graded": 2, "symbolic": 2, "crashes": 1}
    pool.shutdown()


def test_a_worker_that_is_lost_before_it_begins_is_a_fault():
    pool = GraderPool(command=["/bin/false"])
    with pytest.raises(GraderFault, match="died while starting") as lost:
        asyncio.run(pool.grade("1+2x", "2x+1"))
    assert lost.value.infra and "undecided" not in pool.counters
    pool.shutdown()


SLOW_WORKER = """
import json, sys, time
time.sleep({start})
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    time.sleep({answer})
    print(json.dumps({{"equal": True}}), flush=True)
"""


def test_starting_is_no_part_of_the_time():
    pool = GraderPool(timeout_s=2.0, command=[sys.executable, "-c", SLOW_WORKER.format(start=2.5, answer=0)])
    assert asyncio.run(pool.grade("a", "b")) is True
    pool.shutdown()


def test_waiting_is_no_part_of_the_time():
    pool = GraderPool(timeout_s=2.0, command=[sys.executable, "-c", SLOW_WORKER.format(start=0, answer=0.5)])

    async def scenario() -> list[bool]:
        return await asyncio.gather(*(pool.grade("a", "b") for _ in range(5)))

    assert asyncio.run(scenario()) == [True] * 5
    pool.shutdown()


def test_more_than_may_wait_is_a_fault():
    pool = GraderPool(max_waiting=2, command=[sys.executable, "-c", SLOW_WORKER.format(start=0, answer=0.2)])

    async def scenario() -> list:
        return await asyncio.gather(*(pool.grade("a", "b") for _ in range(3)), return_exceptions=True)

    first, second, third = asyncio.run(scenario())
    assert (first, second) == (True, True) and isinstance(third, GraderFault)
    assert asyncio.run(pool.grade("a", "b")) is True
    pool.shutdown()


def test_workers_work_at_the_same_time():
    pool = GraderPool(workers=2)

    async def scenario() -> list:
        slow = pool.grade(*POISON, timeout_s=1)
        quick = [pool.grade(f"{n}+2x", f"2x+{n}", timeout_s=60) for n in range(20)]
        return await asyncio.gather(slow, *quick, return_exceptions=True)

    slow, *quick = asyncio.run(scenario())
    assert slow is False and quick == [True] * 20
    pool.shutdown()


def test_missing_library_is_the_users_to_mend():
    hello = {"ready": False, "error": "No module named math_verify", "package": "math-verify"}
    pool = GraderPool(command=[sys.executable, "-c", f"import json; print(json.dumps({hello}))"])
    with pytest.raises(UserError, match="pip install math-verify"):
        asyncio.run(pool.grade("a", "b"))
    pool.shutdown()


def test_worker_sees_no_secret(monkeypatch, pool):
    monkeypatch.setenv("WANDB_API_KEY", "secret-value")
    own = GraderPool(command=[sys.executable, "-c", SLOW_WORKER.format(start=0, answer=0)])
    asyncio.run(own.grade("a", "b"))
    assert b"secret-value" not in Path(f"/proc/{own._workers[0]._process.pid}/environ").read_bytes()
    own.shutdown()


def test_closing_kills_a_busy_worker():
    pool = GraderPool(command=[sys.executable, "-c", SLOW_WORKER.format(start=0, answer=60)])

    async def scenario() -> int:
        call = asyncio.create_task(pool.grade("a", "b", timeout_s=50))
        while pool._workers[0]._process is None:
            await asyncio.sleep(0.01)
        pid = pool._workers[0]._process.pid
        await pool.close()
        with pytest.raises(GraderFault):
            await call
        return pid

    assert not Path(f"/proc/{asyncio.run(scenario())}").exists()


def test_the_shared_pool_serves_loops_in_turn_and_threads_at_once():
    before = grader.counters["symbolic"]
    answers: list[bool] = []

    def thread(n: int) -> None:
        answers.append(asyncio.run(grader.grade(f"{n}+x", f"x+{n}", timeout_s=60)))

    thread(0)
    threads = [threading.Thread(target=thread, args=(n,)) for n in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert answers == [True] * 5
    assert grader.counters["symbolic"] == before + 5


def test_the_kernel_ends_a_comparison_whose_parent_does_not():
    code = (
        "import resource\nfrom recipe.dag.reward.grader_worker import bound_cpu\nbound_cpu(50)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[0] - used)"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert 49 < float(left) < 60


def test_worker_ends_with_its_parent():
    code = (
        "import asyncio\nfrom recipe.dag.reward import grader\n"
        "print(asyncio.run(grader.grade('1+2x', '2x+1', 60.0)))\n"
        "print(*[w._process.pid for w in grader._shared_pool()._workers if w._process])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    verdict, pid = done.stdout.split()
    assert done.returncode == 0 and verdict == "True"
    assert not Path(f"/proc/{pid}").exists()
