"""First paint and scrolling of the page that `verl-dag trace -o` writes, in a headless Chromium or Chrome.

    python examples/bench_page.py [RUN ...] [--episodes 500] [--seconds 3]

Without RUN, a run's output folder, it makes two runs of `--episodes` with three agents, 300 tokens a call, flagged
episodes and 60 metrics, and changes to episodes of the first. Prints the size of the page, the milliseconds from
opening it to the screen of a run (`shown`) and to the next frame (`painted`), and for each screen that the page links
to, while it scrolls through all of its length, the frames per second, the longest frame of 20 (the 95th percentile),
and the CPU time of the page's thread per frame, which depends little on what else the machine does. The browser draws
at most 60 frames a second, one in 16.7 ms. `CHROME` names another browser.
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

from recipe.dag.episode.replay import Change, Effect, Recorded  # noqa: E402
from recipe.dag.report.journal import Journal  # noqa: E402
from recipe.dag.report.run_folder import read_run  # noqa: E402
from recipe.dag.report.viewer.page import write_page  # noqa: E402
from recipe.dag.report.what_if import effect_record  # noqa: E402
from recipe.dag.types.record import Call, Episode  # noqa: E402

AGENTS, SIBLINGS, STEPS = ("planner", "executor", "verifier"), 4, 10
WORDS = [f"word{number}" for number in range(2000)]
SCREENS = "[...document.querySelectorAll('nav a')].map((one) => [one.textContent, one.hash])"
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


def make_run(folder: Path, episodes: int, seed: int) -> list[dict[str, Any]]:
    """Write a run of groups of 4 siblings over 10 steps, and return effects of changes to the first episode of each."""
    rng, effects = random.Random(seed), []
    journal = Journal(folder, max_per_step=None)
    for step in range(STEPS):
        numbers = range(step * episodes // STEPS, (step + 1) * episodes // STEPS)
        own = [_episode(rng, number // SIBLINGS, number % SIBLINGS) for number in numbers]
        journal.episodes(step, own)
        names = [f"agent/{agent}/{name}" for agent in AGENTS for name in ("reward/mean", *map(str, range(19)))]
        journal.metrics(step, {name: rng.random() for name in ("hack/guess", *names)})
        effects += [_effect(rng, own[0], step, agent) for agent in AGENTS]
    return effects


def _effect(rng: random.Random, episode: Episode, step: int, agent: str) -> dict[str, Any]:
    after, before = ([_episode(rng, 0, episode.index) for _ in range(4)] for _ in range(2))
    change = Change("say", text="word0")
    return effect_record(Effect(Recorded(episode, step, False), (agent, 0, 0), change, after, before), "step 10")


def _episode(rng: random.Random, problem: int, index: int) -> Episode:
    calls = [_call(rng, agent, position) for position, agent in enumerate(AGENTS)]
    prompt = " ".join(random.Random(problem).choices(WORDS, k=40))
    episode = Episode(f"problem-{problem}", index, {"prompt": prompt, "ground_truth": str(problem)}, calls=calls)
    episode.outcome, episode.seconds = float(rng.random() < 0.5), 3.0
    episode.flags = [{"rule": "guess", "reason": "as this says", "call": 2}] if index == 0 else []
    return episode


def _call(rng: random.Random, agent: str, position: int) -> Call:
    ids = [rng.randrange(len(WORDS)) for _ in range(300)]
    call = Call(agent, agent, 0, "main", 0, text=" ".join(WORDS[token] for token in ids), prompt_text="Say words.")
    call.response_ids, call.response_mask = ids, [1] * len(ids)
    call.rollout_log_probs = [-rng.random() for _ in ids]
    call.reward, call.advantage, call.reward_parts = rng.random(), rng.gauss(0, 1), {"team": rng.random()}
    call.start_seconds, call.seconds = float(position), 1.0
    return call


async def measure(executable: str, page: Path, call: str, seconds: float) -> dict[str, Any]:
    """Return `shown` and `painted` in ms, and by screen frames per second, ms of a long frame, ms of CPU per frame.
    call: the route of the call that is open."""
    async with browser(executable) as new_tab:
        tab = await new_tab()
        await tab.open(f"{page.as_uri()}#/run")
        figures = {"painted": await tab.value(PAINTED)}
        await tab.call("Performance.enable", timeDomain="threadTicks")
        figures["shown"] = await tab.value("performance.getEntriesByName('shown')[0].startTime")
        await tab.value(f"location.hash = {call!r}")
        await tab.until("document.querySelector('.detail') !== null")
        for screen, route in await tab.value(SCREENS):
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
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args(arguments)
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium or Chrome on PATH; CHROME names one")
    with tempfile.TemporaryDirectory() as place:
        folders, page, effects = options.runs, Path(place) / "trace.html", []
        if not folders:
            folders = [Path(place) / name for name in ("one", "two")]
            effects, _ = (make_run(folder, options.episodes, seed) for seed, folder in enumerate(folders))
        runs = [read_run(folder) for folder in folders]
        print(write_page(runs, page, effects))
        record = next(one for one in reversed(runs[0].records) if one["split"] == "train")
        call = f"#/episode/{record['step']}/train/{record['uid']}/0/0"
        figures = asyncio.run(measure(executable, page, call, options.seconds))
    print(f"shown {figures.pop('shown'):.0f} ms, painted {figures.pop('painted'):.0f} ms")
    for screen, (rate, long, cpu) in figures.items():
        print(f"{screen:9} {rate:5.1f} frames/s, a long one {long:.0f} ms, {cpu:.1f} ms of CPU a frame")


if __name__ == "__main__":
    main(sys.argv[1:])
