"""First paint and scrolling of the page that `verl-dag trace -o` writes, in a headless Chromium or Chrome.

    python examples/bench_page.py [RUN] [--episodes 500] [--seconds 3]

Without RUN, a run's output folder, it makes a run of `--episodes` with three agents, 300 tokens a call, and 60 metrics.
Prints the size of the page, the milliseconds from opening it to the first screen (`shown`) and to the next frame
(`painted`), and for each screen, while it scrolls through all of its length, the frames per second, the longest frame
of 20 (the 95th percentile), and the CPU time of the page's thread per frame, which depends little on what else the
machine does. The browser draws at most 60 frames a second, one in 16.7 ms. `CHROME` names another browser.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import Tab, browser, find  # noqa: E402

from recipe.dag.report.journal import Journal  # noqa: E402
from recipe.dag.report.run_folder import read_run  # noqa: E402
from recipe.dag.report.viewer.page import write_page  # noqa: E402
from recipe.dag.types.record import Call, Episode  # noqa: E402

AGENTS, SIBLINGS, STEPS = ("planner", "executor", "verifier"), 4, 10
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
SCROLL = """new Promise((done) => {
  const place = document.querySelector(".windowed") ?? document.scrollingElement;
  const [times, end] = [[], performance.now() + SECONDS * 1000];
  let step = 60;
  const frame = (now) => {
    times.push(now);
    const before = place.scrollTop;
    place.scrollTop += step;
    step = place.scrollTop === before ? -step : step;
    if (now < end) {
      requestAnimationFrame(frame);
    } else {
      const lengths = times.slice(1).map((time, at) => time - times[at]).sort((a, b) => a - b);
      const mean = lengths.reduce((a, b) => a + b, 0) / lengths.length;
      done([1000 / mean, lengths[Math.floor(0.95 * lengths.length)], lengths.length]);
    }
  };
  requestAnimationFrame(frame);
})"""


def make_run(folder: Path, episodes: int) -> Path:
    """Write a run of groups of 4 siblings over 10 steps, and return its folder."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    journal = Journal(folder, max_per_step=None)
    for step in range(STEPS):
        numbers = range(step * episodes // STEPS, (step + 1) * episodes // STEPS)
        journal.episodes(step, [_episode(rng, words, number // SIBLINGS, number % SIBLINGS) for number in numbers])
        names = (f"agent/{agent}/{name}" for agent in AGENTS for name in ("reward/mean", *map(str, range(19))))
        journal.metrics(step, {name: rng.random() for name in names})
    return folder


def _episode(rng: random.Random, words: Sequence[str], problem: int, index: int) -> Episode:
    calls = [_call(rng, words, agent, position) for position, agent in enumerate(AGENTS)]
    sample = {"prompt": " ".join(rng.choices(words, k=40)), "ground_truth": str(problem)}
    return Episode(f"problem-{problem}", index, sample, calls=calls, outcome=float(rng.random() < 0.5), seconds=3.0)


def _call(rng: random.Random, words: Sequence[str], agent: str, position: int) -> Call:
    ids = [rng.randrange(2000) for _ in range(300)]
    call = Call(agent, agent, 0, "main", 0, text=" ".join(words[token] for token in ids), prompt_text="Say words.")
    call.response_ids, call.response_mask = ids, [1] * len(ids)
    call.rollout_log_probs = [-rng.random() for _ in ids]
    call.reward, call.advantage, call.reward_parts = rng.random(), rng.gauss(0, 1), {"team": rng.random()}
    call.start_seconds, call.seconds = float(position), 1.0
    return call


async def measure(executable: str, page: Path, routes: dict[str, str], seconds: float) -> dict[str, Any]:
    """Return `shown` and `painted` in ms, and by screen frames per second, ms of a long frame, ms of CPU per frame."""
    async with browser(executable) as new_tab:
        tab = await new_tab()
        await tab.open(page.as_uri())
        figures = {"painted": await tab.value(PAINTED)}
        await tab.call("Performance.enable", timeDomain="threadTicks")
        figures["shown"] = await tab.value("performance.getEntriesByName('shown')[0].startTime")
        for screen, route in routes.items():
            await tab.value(f"location.hash = {route!r}")
            await tab.until("document.querySelector('main [role=status].empty') === null")
            await asyncio.sleep(0.5)
            before = await _cpu_seconds(tab)
            rate, long, frames = await tab.value(SCROLL.replace("SECONDS", str(seconds)))
            figures[screen] = rate, long, 1000 * (await _cpu_seconds(tab) - before) / frames
        await tab.close()
    return figures


async def _cpu_seconds(tab: Tab) -> float:
    metrics = await tab.call("Performance.getMetrics")
    return next(one["value"] for one in metrics["metrics"] if one["name"] == "TaskDuration")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args(arguments)
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium or Chrome on PATH; CHROME names one")
    with tempfile.TemporaryDirectory() as place:
        run = read_run(options.run or make_run(Path(place) / "run", options.episodes))
        page = Path(place) / "trace.html"
        print(write_page([run], page))
        record = next(one for one in reversed(run.records) if one["split"] == "train")
        where = f"{record['step']}/train/{record['uid']}"
        routes = {"run": "#/run", "problems": "#/problems", "group": f"#/group/{where}"}
        routes |= {"episode": f"#/episode/{where}/0/0", "tokens": f"#/tokens/{where}/0/0", "credit": "#/credit"}
        figures = asyncio.run(measure(executable, page, routes, options.seconds))
    print(f"shown {figures['shown']:.0f} ms, painted {figures['painted']:.0f} ms")
    for screen in routes:
        rate, long, cpu = figures[screen]
        print(f"{screen:9} {rate:5.1f} frames/s, a long one {long:.0f} ms, {cpu:.1f} ms of CPU a frame")


if __name__ == "__main__":
    main(sys.argv[1:])
