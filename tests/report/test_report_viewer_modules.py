"""The pure modules of the page in node."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.dag.report.starvation import Starvation
from recipe.dag.report.viewer.page import WEB
from recipe.dag.report.viewer.payload import parts_of
from tests.report.conftest import RULE, flagged_run

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
    index, audited = parts_of(trained)["index"], parts_of(flagged_run(trained))["index"]
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
    done = subprocess.run(["tsc", "-p", WEB], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
