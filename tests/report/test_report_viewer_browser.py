"""The page of `verl-dag trace -o` in a headless Chromium or Chrome, opened from disk, and its pure modules in node."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.report.run_folder import read_run
from recipe.dag.report.starvation import Starvation
from recipe.dag.report.viewer.page import WEB, write_page
from recipe.dag.report.viewer.payload import parts_of
from tests.browser import browser, find
from tests.report.conftest import build_call, build_episode, build_result

MARKUP = '</script><script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">'
HOSTILE = f"{MARKUP}\x1b[31mred\x00 \u202eevil\u202c \u200f \ud800 \u05d0\u05d1"
SHOWN = MARKUP + (
    "\u241b[31mred\u2400 \u27e8202E\u27e9evil\u27e8202C\u27e9 \u27e8200F\u27e9 \u27e8D800\u27e9 \u05d0\u05d1"
)
RULE = HOSTILE.replace("\ud800", "")
LINE = "x" * 1_000_000
OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of two problems with four siblings each, and a validation of hostile texts."""
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(folder)
    for step in (1, 2):
        for problem in "ab":
            journal.episodes(step, [_sibling(f"{step}-{problem}", problem, index) for index in range(4)])
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


def _sibling(uid: str, problem: str, index: int):
    solved = index % 2 == 0
    sign = 1.0 if solved else -1.0
    plan = build_call("plan", reward=0.5, reward_parts={"team": 0.5}, advantage=0.0, start_seconds=0.1, seconds=0.5)
    result = build_result(start_seconds=0.7)
    check = build_call("check", reward=sign, reward_parts={"score": sign}, advantage=sign, tool_results=[result])
    check.text, check.start_seconds, check.seconds = f"the answer is {index}", 0.6, 1.0
    sample = {"prompt": f"problem {problem}", "ground_truth": "42"}
    return build_episode(uid, index, calls=[plan, check], sample=sample, outcome=float(solved))


@pytest.fixture(scope="module")
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


async def visit(tab, route: str) -> None:
    await tab.value(f"location.hash = {json.dumps(route)}")
    await tab.until("document.querySelector('main [role=status].empty') === null")


def test_every_call_is_on_the_screen_of_its_episode_once(opened, run):
    async def script(tab):
        for record in run.records:
            if record["split"] == "train":
                await visit(tab, f"#/episode/{record['step']}/train/{record['uid']}/{record['index']}")
                title = f"{record['uid']}, number {record['index']}"
                await tab.until(f"document.querySelector('h1').textContent.includes({json.dumps(title)})")
                ids = await tab.value("[...document.querySelectorAll('[data-call]')].map((one) => one.dataset.call)")
                assert ids == ["0", "1"]

    opened(script)


def test_hostile_texts_are_shown_as_text(opened):
    async def script(tab):
        for key in "354":
            await tab.press(key)
            await tab.until("document.querySelector('main h1')?.textContent.includes('evil')")
        await tab.press("Escape")
        await tab.press("j")
        await tab.until("document.querySelector('.detail') !== null")
        text = await tab.value("document.querySelector('main').textContent")
        assert text.count(SHOWN) >= 6 and "\x1b" not in text and "\u202e" not in text
        assert len(text) < 100_000, "a line of a megabyte is shown in part"
        await tab.value("document.querySelector('.tool-call .more').click()")
        await tab.until("document.querySelector('main').textContent.length > 30000")
        assert await tab.value("document.title") != "owned"
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0
        assert await tab.value(OVERFLOW)

    opened(script, "#/problems//validation", width=400)


def test_the_keyboard_leads_from_a_call_to_its_siblings_and_to_other_steps(opened):
    async def script(tab):
        async def pressed(keys: str, expected: str) -> None:
            for key in keys:
                await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(expected)}")

        await pressed("j", "#/episode/1/train/1-a/0/0")
        await pressed("j", "#/episode/1/train/1-a/0/1")
        await pressed("h", "#/episode/1/train/1-a/0/0")
        await pressed("l]", "#/episode/1/train/1-a/1/1")
        await pressed("}", "#/episode/2/train/2-a/1/1")
        await pressed("{[", "#/episode/1/train/1-a/0/1")
        await pressed("5", "#/tokens/1/train/1-a/0/1")
        await pressed("3", "#/group/1/train/1-a/0")
        await tab.press("?")
        await tab.until("document.querySelector('[role=dialog]').textContent.includes('search')")
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        await tab.until("document.querySelector('[role=dialog]') === null")
        await tab.press("/")
        await tab.until("document.activeElement.type === 'search'")
        await tab.call("Input.insertText", text="answer is 3")
        await tab.until("document.querySelectorAll('.hits a').length === 4")

    opened(script, "#/episode/1/train/1-a/0")


def test_a_link_opens_its_call(opened):
    async def script(tab):
        await tab.until("document.querySelector('#call-1 .detail') !== null")
        assert "the answer is 3" in await tab.value("document.querySelector('#call-1 .detail').textContent")
        assert await tab.value("document.querySelector('#call-0 .detail')") is None

    opened(script, "#/episode/2/train/2-b/3/1", dark=True)


def test_a_group_says_what_separated_the_solved_from_the_rest(opened):
    async def script(tab):
        await tab.until("document.querySelector('.siblings .snippet')?.textContent.includes('from plan')")
        text = await tab.value("document.querySelector('main').textContent")
        assert "check: reward of score" in text and "plan: tokens" not in text
        assert "first call whose texts differ is check" in text
        sums = "[...document.querySelectorAll('.siblings tbody tr')].map((row) => row.lastElementChild.textContent)"
        assert await tab.value(sums) == ["0.00", "0.00"]

    opened(script, "#/group/1/train/1-a")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_no_screen_is_wider_than_the_window(opened, width, dark):
    async def script(tab):
        for link, key in enumerate("1234568"):
            await tab.press(key)
            await tab.until(f"document.querySelectorAll('nav a')[{link}].ariaCurrent === 'true'")
            await tab.until("document.querySelector('main h1') !== null")
            assert await tab.value(OVERFLOW), key

    opened(script, width=width, dark=dark)


def _effect(step: int, at: str) -> dict:
    """What the file of effects has of one."""
    call = {"node": "plan", "agent": "plan", "turn": 0, "round": 0, "text": HOSTILE, "completion": None}
    return {
        **{"step": step, "split": "train", "uid": f"{step}-a", "index": 0, "at": [at, 0, 0], "agent": at},
        **{"change": {"kind": "say", "agent": "", "text": HOSTILE}, "weights": HOSTILE, "recorded": 1.0},
        **{"before": [1.0, 1.0], "after": [0.0, None], "interval": [-1.0, -1.0, -1.0], "repeats": True},
        **{"first": ["check", 0, 0], "episodes": [{"calls": [call]}, {"calls": [{**call, "text": ""}]}]},
    }


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_what_if_shows_effects_beside_the_record_as_text(opened, run, tmp_path, width, dark):
    file = tmp_path / "what_if.html"
    write_page([run], file, [_effect(step, at) for step in (1, 2) for at in ("plan", "check")])

    async def script(tab):
        await tab.call("Page.navigate", url=file.as_uri())
        await tab.until("location.hash === '#/what-if'")
        tab.requests[:] = tab.requests[:1]
        await tab.press("j")
        await tab.until("location.hash === '#/what-if/1/train/1-a/0/0'")
        await tab.press("j")
        await tab.until("location.hash === '#/what-if/1/train/1-a/0/1'")
        rows = "[...document.querySelectorAll('[aria-label=continuation] tbody tr')].map((row) => row.textContent)"
        await tab.until(f"{rows}[1]?.includes('the fork')")  # no longer the effect before
        plan, check = await tab.value(rows)
        assert "from plan" in plan and "owned" in plan and "\x1b" not in plan and "\u202e" not in plan
        assert "not called" in check
        await tab.value("document.querySelectorAll('[aria-label=continuation] button')[1].click()")
        await tab.until(f"{rows}[0].includes('(silent)')")
        cell = "document.querySelector('[data-effect=\"3\"]').textContent"
        assert "1.00 \u2192 0.00" in await tab.value(cell) and "then another answer: check" in await tab.value(cell)
        assert await tab.value(OVERFLOW) and await tab.value("document.title") != "owned"
        for key, screen in (
            ("4", "#/episode/1/train/1-a/0/1"),
            ("7", "#/what-if/1/train/1-a/0/0"),
            ("4", "#/episode/1/train/1-a/0/0"),
            ("}", "#/episode/2/train/2-a/0/0"),
            ("7", "#/what-if/2/train/2-a/0/2"),
            ("5", "#/tokens/2/train/2-a/0/0"),
        ):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")

    opened(script, width=width, dark=dark)


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_runs_are_compared_at_equal_tokens_and_problem_by_problem(opened, run, tmp_path, width, dark):
    file, other = tmp_path / "compare.html", Journal(tmp_path / "other")
    for step, problem in ((1, "b"), (2, "a")):  # it has sampled less, and solves all of b but nothing of a
        group = [_sibling(f"{step}-{problem}", problem, index) for index in range(4)]
        other.episodes(step, [replace(one, outcome=float(problem == "b")) for one in group])
        other.metrics(step, {"episode/accuracy": 0.5, "episode/count": 4.0, "tokens/sampled": 40.0})
    hostile = build_episode(HOSTILE, calls=[build_call(HOSTILE, text=HOSTILE)], sample=run.records[-1]["sample"])
    other.episodes(2, [hostile], split="validation")
    write_page([run, read_run(tmp_path / "other")], file)

    async def script(tab):
        await tab.call("Page.navigate", url=file.as_uri())
        await tab.until("location.hash === '#/compare'")
        tab.requests[:] = tab.requests[:1]
        await tab.until("document.querySelector('.steps b').textContent === '80'")
        cells = "[...document.querySelectorAll('tbody tr')].map((row) => row.children[3].textContent).join()"
        assert await tab.value(cells) == "1,2", "the steps that 80 tokens reach"
        await visit(tab, "#/compare/120")
        await tab.until("document.querySelector('.compared .problem')?.textContent.includes('owned')")
        await tab.press("j")
        await tab.until("document.querySelector('section[aria-label=problem] tbody tr') !== null")
        assert SHOWN[:20] in await tab.value("document.querySelector('section[aria-label=problem] tbody').textContent")
        await tab.value(
            "[...document.querySelectorAll('.compared button')].find((one) => /train/.test(one.innerText)).click()"
        )
        await tab.until("location.hash === '#/compare/120/train'")
        await visit(tab, "#/compare/120/train///1")
        for key, screen in (("9", "#/compare/120/train///1"), ("5", "#/tokens/2/train/2-a/0/0")):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")
        await visit(tab, "#/compare/120/train")
        await tab.press("1")
        await tab.until("location.hash === '#/run'")
        await visit(tab, "#/compare//train")
        row = "[...document.querySelectorAll('.compared .row:not(.head)')].map((one) => one.textContent).join()"
        await tab.until(f"{row} === 'problem a500,problem b50100'")
        await tab.press("j")
        await tab.press("j")
        await tab.until("location.hash === '#/compare//train///1'")
        said = "[...document.querySelectorAll('[aria-label=problem] tbody tr')].map((row) => row.textContent).join()"
        await tab.until(f"{said}.includes('the same')")
        assert await tab.value("document.querySelectorAll('.history .cell.faint').length") == 1
        link = "document.querySelector('[aria-label=problem] thead th:last-child a')"
        await tab.until(f"{link}?.hash === '#/2/episode/1/train/1-b/0'")
        await tab.value(f"{link}.click()")
        await tab.until("location.hash === '#/2/episode/1/train/1-b/0'")
        await tab.press("r")
        await tab.until("location.hash === '#/episode/1/train/1-b/0'")
        await tab.press("}")
        await tab.until("location.hash === '#/episode/2/train/2-b/0'")
        choose = "(one) => { one.value = '1'; one.dispatchEvent(new Event('change')); }"
        await tab.value(f"({choose})(document.querySelector('nav select'))")
        await tab.until("location.hash === '#/2/episode/1/train/1-b/0'")
        for key, screen in (("3", "#/2/group/1/train/1-b/0"), ("1", "#/2/run/1"), ("9", "#/2/compare")):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")
            assert await tab.value(OVERFLOW), screen
        assert await tab.value("document.title") != "owned"
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0

    opened(script, width=width, dark=dark)


def _flagged(run):
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


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_the_audit_leads_from_a_rule_to_the_episodes_and_what_they_were_paid(opened, run, tmp_path, width, dark):
    file = tmp_path / "audit.html"
    write_page([_flagged(run)], file)

    async def script(tab):
        await tab.press("8")
        await tab.until("document.querySelector('main .empty')?.textContent.includes('report.monitors=all')")
        await tab.call("Page.navigate", url=f"{file.as_uri()}#/audit")
        rows = "[...document.querySelectorAll('{} .row:not(.head), {} tbody tr')].map((one) => one.innerText)"
        rules, listed = (rows.replace("{}", place) for place in (".rules", ".compared"))
        await tab.until(f"{listed}.length === 2")
        tab.requests[:] = tab.requests[:1]
        assert [row.split("\t")[1:] for row in await tab.value(rules)] == [
            ["2", "0.00", "+0.25", "+0.25", "50 %"],
            ["1", "\u22121.33", "\u22120.50", "+0.83", "0 %"],
            ["2", "0.00", "+0.25", "+0.25", "50 %"],
        ]
        text = await tab.value("document.querySelector('main').textContent")
        shown = text.count(SHOWN[: SHOWN.index("evil")])
        assert shown == 4, "the rule in the table, below the curves and in the list, and a reason"
        assert "\x1b" not in text and "\u202e" not in text
        assert "step 10: the reward of check rises and accuracy does not" in text
        assert "Did not fire: tool_probe" in text and "hack/any" not in text
        await tab.until("document.querySelectorAll('.uplot').length === 1")
        assert await tab.value(OVERFLOW) and await tab.value("document.title") != "owned"
        for keys, address in (
            ("j", "#/audit/1/train/1-a/0/1"),
            ("j", "#/audit/2/train/2-b/1"),
            ("k", "#/audit/1/train/1-a/0/1"),
            (["Enter"], "#/episode/1/train/1-a/0/1"),
            ("8", "#/audit/1/train/1-a/0"),
        ):
            for key in keys:
                await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(address)}")
        await tab.value("document.querySelectorAll('.rules a')[1].click()")
        await tab.until(f"{listed}.length === 1")
        await tab.press("j")
        await tab.until("location.hash.startsWith('#/audit/2/train/2-b/1//')")
        await tab.value("document.querySelector('.compared .row a').click()")
        await tab.until("location.hash === '#/episode/2/train/2-b/1'")
        await tab.until("document.querySelector('.alarms')?.textContent.includes('flagged')")
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0

    opened(script, width=width, dark=dark)


NODE = """
const { Model, aboveSiblings, creditOf, differences } = await import(URL + "/model.js");
const { formatRoute, parseRoute } = await import(URL + "/route.js");
const { dominance, histogram, trend, wilson } = await import(URL + "/statistics.js");
const { firstDifference, visible } = await import(URL + "/text.js");
const { counted, signed } = await import(URL + "/format.js");
const { alarmsAt, unearnedRewards } = await import(URL + "/alarms.js");
const { flagged, rulesOf } = await import(URL + "/audit.js");
const { axisOf, curvesOf, shared } = await import(URL + "/compare.js");
const model = new Model(INDEX);
const cut = { ...INDEX, problems: INDEX.problems.map((one) => ({ ...one, text: "begins alike" })) };
const alike = [new Model(cut, 0), new Model(cut, 1)];
const group = model.groupAt({ step: 1, split: "train", uid: "1-a" });
const [plan, check] = creditOf(model.at(1), model.agents);
const series = { "agent/a/reward/mean": [...Array(20).keys()], "episode/accuracy": Array(20).fill(0.5) };
series["agent/a/grad_tokens_share"] = [0.01];
const rising = { metrics: { steps: [], series }, agents: ["a"] };
const metrics = (steps, series) => ({ ...INDEX, metrics: { steps, series } });
const pair = [metrics([1, 2], { "tokens/sampled": [60, 60], loss: [3, 2] }),
  metrics([0, 1, 2], { "tokens/sampled": [null, 40, 30], loss: [null, 1, null] })].map((one, at) => new Model(one, at));
const uncounted = new Model(metrics([1, 2, 4], {}), 1);
const audited = new Model(AUDITED);
const numbers = ({ episode, paid, others, gain }) => [episode.uid, episode.index, paid, others, gain];
const odd = { screen: "group", uid: "%/#", split: "t", step: 0 };
console.log(JSON.stringify({
  kinds: model.matrix("train").rows.map((row) => row.kind),
  history: model.history(group[0]).map((one) => one[0].uid),
  alike: shared(alike, parseRoute("#/compare//train")).rows.map(({ cells }) => cells.map((one) => one.episodes[0].uid)),
  differences: differences(group),
  above: [aboveSiblings(group, group[0].calls[1], "score"), aboveSiblings([group[0]], group[0].calls[1], "score")],
  mass: [plan.mass, check.mass], signal: [plan.signal, check.signal], agreement: [plan.agreement, check.agreement],
  route: [formatRoute(parseRoute("#/episode/3/train/a%2Fb/0/2")), parseRoute(formatRoute(odd)).uid,
    parseRoute(formatRoute({ column: "\\ud800" })).column],
  dominance: [dominance([2, 3], [1]), dominance([1], [1]), dominance([], [1])],
  histogram: histogram([0, 1, 1, 2], 2), trend: trend([1, 2, 3]), wilson: wilson(0.5, 100).map((one) => one.toFixed(3)),
  difference: [firstDifference(["say one", "say two"]), firstDifference(["same", "same"])],
  visible: visible("a\\n\\u001b\\u202e"), signed: [signed(-0.001), signed(1), signed(-2), signed(null)],
  counted: [counted(1, "call"), counted(2, "call"), counted(null, "token"), counted(1234.5, "token", "1.2k")],
  axis: [axisOf(pair), axisOf([model, uncounted])],
  curves: curvesOf(pair, axisOf(pair), ["loss"]),
  shared: shared(pair, parseRoute("#/compare/70/train")).rows.map((row) => row.cells.map((cell) => cell.step)),
  flagged: flagged(audited, "many_boxes").map(numbers), none: flagged(audited, "tool_probe"),
  rules: rulesOf(audited).map(({ rule, rows, shares }) => [rule, rows.length, shares[0]]),
  unearned: unearnedRewards(NOISY),
  alarms: [alarmsAt(rising, 19).length, alarmsAt(rising, 0)],
}));
"""


def _noisy_metrics() -> list[dict]:
    """Rewards that rise after they have fallen, once beside an accuracy that has nothing left to learn."""
    rng = random.Random(0)
    noise = (rng.gauss(0, 0.1) for _ in iter(int, 1))
    rises = {step: abs(step % 60 - 30) / 20 for step in range(120)}
    return [
        {
            **{"step": step, "episode/accuracy": 0.95 if step < 60 else 0.5 + next(noise)},
            **{"agent/check/reward/mean": rises[step] + next(noise), "agent/plan/reward/mean": next(noise)},
        }
        for step in range(120)
    ]


def computed(text: str, tmp_path, values: dict) -> dict:
    """What a script of the page's modules prints."""
    if shutil.which("node") is None:
        pytest.skip("no node on PATH")
    modules = tmp_path / "web"
    shutil.copytree(WEB, modules)
    (modules / "package.json").write_text('{"type": "module"}')
    script = tmp_path / "script.mjs"
    values["URL"] = modules.as_uri()
    script.write_text(re.sub("|".join(values), lambda name: json.dumps(values[name[0]]), text))
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_the_screens_compute(run, tmp_path):
    trained = replace(run, records=[one for one in run.records if one["split"] == "train"])
    index, audited = parts_of(trained)["index"], parts_of(_flagged(trained))["index"]
    lines = _noisy_metrics()
    noisy = parts_of(replace(trained, metrics=lines))["index"]
    got = computed(NODE, tmp_path, {"INDEX": index, "AUDITED": audited, "NOISY": noisy})
    assert got["kinds"] == ["mixed", "mixed"] and got["history"] == ["1-a", "2-a"]
    assert got["alike"] == [["2-a", "2-a"], ["2-b", "2-b"]]
    (difference,) = got["differences"]
    assert difference == {"label": "check: reward of score", "solved": 1, "rest": -1, "effect": 1}
    assert (got["mass"], got["signal"], got["agreement"]) == ([0, 1], [0, 1], [0, 1])
    assert got["above"] == [1, None]
    assert got["route"] == ["#/episode/3/train/a%2Fb/0/2", "%/#", "\ufffd"]
    assert got["dominance"] == [1, 0, None] and got["histogram"] == {"low": 0, "high": 2, "counts": [1, 3]}
    assert (got["trend"], got["wilson"], got["difference"]) == (None, ["0.404", "0.596"], [4, 0])
    assert got["visible"] == "a\n\u241b\u27e8202E\u27e9" and got["signed"] == ["0.00", "+1.00", "\u22122.00", "\u2013"]
    assert got["counted"] == ["1 call", "2 calls", "\u2013 tokens", "1.2k tokens"]
    counted = {"name": "sampled tokens", "places": [[60, 120], [0, 40, 70]], "limit": 70}
    assert got["axis"] == [counted, {"name": "step", "places": [[1, 2], [1, 2, 4]], "limit": 2}]
    assert got["curves"] == {"places": [40, 60, 120], "runs": [[[None, 3, 2]], [[1, None, None]]]}
    assert got["shared"] == [[1, 2], [1, 2]]
    assert got["flagged"] == [["1-a", 0, 1, pytest.approx(-1 / 3), pytest.approx(4 / 3)]] + [
        ["2-b", 1, -0.5, pytest.approx(5 / 6), pytest.approx(-4 / 3)]
    ]
    assert got["rules"] == [["many_boxes", 2, 0.25], [RULE, 1, 0.125], ["tool_probe", 0, 0.0]] and got["none"] == []
    starvation = Starvation(SimpleNamespace(agents=[SimpleNamespace(name=n, policy=n) for n in ("plan", "check")]))  # pyright: ignore
    assert got["unearned"] == [
        f"step {line['step']}: the reward of {agent} rises and accuracy does not: look at what it is paid for"
        for line in lines
        for agent in re.findall("reward of agent (.*) rises", "".join(starvation.lines(line)))
    ]
    (low,) = got["alarms"][1]
    assert got["alarms"][0] == 1 and "a supplies 1 % of the gradient's tokens" in low


FORKS = """
const { Model, cellOf, creditOf, differences, nodeNumbers } = await import(URL + "/model.js");
const model = new Model(INDEX);
const { solved, graded, reward, episodes } = cellOf(model.at(1));
console.log(JSON.stringify({
  cell: [solved, graded, reward, episodes.length],
  nodes: [...nodeNumbers(model.at(1)).calls].map(([node, calls]) => [node, calls.length]),
  credit: creditOf(model.at(1), model.agents).map((one) => [one.calls, one.reward, one.advantages]),
  differences: differences(model.at(1)).length,
}));
"""


def test_what_forks_repeat_counts_once(run, tmp_path):
    """A solved episode, and one that is not with a fork at `check` that is."""
    records = [one for one in run.records if one["split"] == "train" and one["uid"] == "1-a"][:3]
    plan, check = records[2]["calls"]
    calls = [plan | {"replayed": True, "train": False, "advantage": None}, check]
    records[2] = records[2] | {"forked": {"from": 1, "at": "check"}, "calls": calls}
    got = computed(FORKS, tmp_path, {"INDEX": parts_of(replace(run, records=records))["index"]})
    assert got == {
        "cell": [1, 2, 0.5, 3],
        "nodes": [["plan", 2], ["check", 2]],
        "credit": [[2, 0.5, [0, 0]], [3, 0, [1, -1, 1]]],
        "differences": 1,
    }


def test_the_modules_have_the_types_that_their_comments_say():
    if shutil.which("tsc") is None:
        pytest.skip("no tsc on PATH: npm install --global typescript")
    done = subprocess.run(["tsc", "-p", WEB], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
