from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.report.run_folder import Run, read_run
from recipe.dag.report.viewer.page import write_page
from recipe.dag.types.record import Call, Episode, ToolResult
from tests.browser import Tab, browser, find

MARKUP = '</script><script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">'
HOSTILE = f"{MARKUP}\x1b[31mred\x00 \u202eevil\u202c \u200f \ud800 \u05d0\u05d1"
SHOWN = MARKUP + (
    "\u241b[31mred\u2400 \u27e8202E\u27e9evil\u27e8202C\u27e9 \u27e8200F\u27e9 \u27e8D800\u27e9 \u05d0\u05d1"
)
RULE = HOSTILE.replace("\ud800", "")
LINE = "x" * 1_000_000
OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


def build_call(agent: str = "solver", *, sampled: int = 4, **fields) -> Call:
    call = {
        "node": agent,
        "agent_group": 0,
        "policy": "main",
        "turn": 0,
        "prompt_ids": [1] * 10,
        "response_ids": [7] * (sampled + 2),
        "response_mask": [1] * sampled + [0, 0],
        "rollout_log_probs": [-0.5] * sampled + [0.0, 0.0],
        "prompt_text": f"to {agent}",
        "text": f"from {agent}",
        "stop_reason": "stop",
        "generations": 1,
    }
    return Call(agent=agent, **(call | fields))


def build_episode(uid: str = "u0", index: int = 0, *, calls: list[Call] | None = None, **fields) -> Episode:
    sample = {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"problem {uid}"}],
        "data_source": "amc",
        "ground_truth": "42",
    }
    episode = {"sample": sample, "calls": [build_call()] if calls is None else calls, "turns": 1, "seconds": 2.0}
    return Episode(uid=uid, index=index, **(episode | fields))


def build_result(status: str = "success", **fields) -> ToolResult:
    result = {"name": "code_interpreter", "arguments": {"code": "print(1)"}, "text": "1", "seconds": 0.5}
    return ToolResult(status=status, **(result | fields))


@pytest.fixture(scope="session")
def make_call() -> Callable[..., Call]:
    return build_call


@pytest.fixture(scope="session")
def make_episode() -> Callable[..., Episode]:
    return build_episode


@pytest.fixture(scope="session")
def make_result() -> Callable[..., ToolResult]:
    return build_result


@pytest.fixture(scope="session")
def fault() -> dict:
    return {"boundary": "sandbox", "infra": True, "where": "execute", "message": "connection refused"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Lines(io.StringIO):
    """Lets a test wait until so many lines were printed."""

    def __init__(self, wanted: int):
        super().__init__()
        self.wanted, self.enough = wanted, threading.Event()

    def flush(self) -> None:
        if self.getvalue().count("\n") >= self.wanted:
            self.enough.set()


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture(scope="session")
def lines() -> type[Lines]:
    return Lines


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Two steps of two problems with four siblings each, and a validation of hostile texts."""
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder)
    for step in (1, 2):
        for problem in "ab":
            journal.episodes(step, [build_sibling(f"{step}-{problem}", problem, index) for index in range(4)])
        numbers = {
            "episode/accuracy": 0.25 * step,
            "tokens/sampled": 60.0,
            "episode/count": 8.0,
            "timing/step": 2.0,
            "timing/rollout": 1.5,
        }
        journal.metrics(step, numbers | {f"agent/{name}/reward/mean": 0.5 for name in ("plan", "check")})
    tool = build_result(text=HOSTILE, name=HOSTILE, arguments={"code": LINE}, stderr=HOSTILE)
    calls = [build_call(HOSTILE, text=HOSTILE, prompt_text=HOSTILE, tool_results=[tool]), build_call("plan", text=LINE)]
    sample = {"prompt": HOSTILE, "ground_truth": HOSTILE, "data_source": HOSTILE}
    journal.episodes(2, [build_episode(f"{HOSTILE}/#?%", calls=calls, sample=sample)], split="validation")
    launch = folder / "run" / "1"
    launch.mkdir(parents=True)
    nodes = [{"id": "plan", "agent": "plan"}, {"id": "check", "agent": "check", "after": ["plan"]}]
    agents = [{"name": name, "policy": "main"} for name in ("plan", "check")]
    workflow = {"dag_id": "team", "agents": agents, "nodes": nodes, "policies": {"main": {"model": {"path": "m"}}}}
    (launch / "workflow.json").write_text(json.dumps(workflow))
    return read_run(folder)


def build_sibling(uid: str, problem: str, index: int) -> Episode:
    solved = index % 2 == 0
    sign = 1.0 if solved else -1.0
    plan = build_call("plan", reward=0.5, reward_parts={"team": 0.5}, advantage=0.0, start_seconds=0.1, seconds=0.5)
    result = build_result(start_seconds=0.7)
    check = build_call("check", reward=sign, reward_parts={"score": sign}, advantage=sign, tool_results=[result])
    check.text, check.start_seconds, check.seconds = f"the answer is {index}", 0.6, 1.0
    sample = {"prompt": f"problem {problem}", "ground_truth": "42"}
    return build_episode(uid, index, calls=[plan, check], sample=sample, outcome=float(solved))


def flagged_run(run: Run) -> Run:
    """The run with two flags of hostile texts, and a reward that rises from step to step."""

    def with_flags(record):
        call = {("1-a", 0): 1, ("2-b", 1): None}.get((record["uid"], record["index"]), -1)
        names = {1: ["many_boxes"], None: [RULE, "many_boxes"]}.get(call, [])
        return record | {"flags": [{"rule": name, "reason": HOSTILE, "call": call} for name in names]}

    shares = {"hack/many_boxes": 0.25, f"hack/{RULE}": 0.125, "hack/tool_probe": 0.0, "hack/any": 0.25}
    metrics = [
        {"step": step, "episode/accuracy": 0.5, "agent/check/reward/mean": step / 20} | shares for step in range(1, 15)
    ]
    return replace(run, records=[with_flags(record) for record in run.records], metrics=metrics)


@pytest.fixture(scope="session")
def opened(run, tmp_path_factory):
    """A function that runs `await script(tab)` on a new tab with the page."""
    executable = find()
    if executable is None:
        pytest.skip("no Chromium or Chrome on PATH, and CHROME is not set")
    file = tmp_path_factory.mktemp("page") / "trace.html"
    write_page([run], file)
    loop = asyncio.new_event_loop()
    started = browser(executable)
    tab_of = loop.run_until_complete(started.__aenter__())

    def drive(script, route: str = "", **options):
        async def in_tab():
            tab = await tab_of()
            try:
                await tab.open(f"{file.as_uri()}{route}", **options)
                await script(tab)
                assert tab.errors == [] and [u for u in tab.requests if not u.startswith("data:")] == [file.as_uri()]
            finally:
                await tab.close()

        loop.run_until_complete(in_tab())

    yield drive
    loop.run_until_complete(started.__aexit__(None, None, None))
    loop.close()


async def visit(tab: Tab, route: str) -> None:
    await tab.value(f"location.hash = {json.dumps(route)}")
    await tab.until("document.querySelector('main [role=status].empty') === null")
