"""The report of a study: what is measured when, and how arms are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.report.study import (
    Figures,
    Result,
    draw,
    latex,
    markdown,
    paired_interval,
    read_answers,
    read_result,
    rows,
    write_report,
)

METRICS = ("episode/accuracy", "val/accuracy")


def run_in(folder: Path, validations: dict[int, float], *, solved: str, tokens: int = 10) -> Path:
    """Write a run of three steps and its last validation, `solved` has a digit per problem."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(4):
        line = {"step": step, "timing/step": 360.0} if step else {"step": 0, "timing/validation": 720.0}
        line |= {"tokens/sampled": tokens, "episode/accuracy": step / 10} if step else {}
        if step in validations:
            line |= {"val/accuracy": validations[step], "val/episode/count": 4, "val/tokens/sampled": 50}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    items = [{"prompt": f"p{i}", "metrics": {"is_correct": digit == "1"}} for i, digit in enumerate(solved)]
    (folder / "results.json").write_text(json.dumps(items))
    return folder


def result(scores: str, *, tokens: int = 30) -> Result:
    by_problem = {str(i): float(digit) for i, digit in enumerate(scores)}
    end = sum(by_problem.values()) / len(by_problem)
    curves = {"val/accuracy": [(0.0, 0.0), (float(tokens), end)]}
    return Result(curves, by_problem, tokens, answer_tokens=5.0, hours=0.5, gpus=0)


def test_a_measurement_has_the_tokens_that_its_weights_were_trained_with(tmp_path):
    found = read_result(run_in(tmp_path / "run", {0: 0.25, 2: 0.5, 3: 0.75}, solved="1110"), METRICS)
    assert found.curves["episode/accuracy"] == [(0.0, 0.1), (10.0, 0.2), (20.0, 0.3)]  # before the step's update
    assert found.curves["val/accuracy"] == [(0.0, 0.25), (20.0, 0.5), (30.0, 0.75)]
    assert (found.tokens, found.score, found.answer_tokens) == (30, 0.75, 12.5)
    assert found.hours == pytest.approx(0.5) and found.gpus == 0


def test_hours_of_gpus_are_those_of_all_of_them(tmp_path):
    folder = run_in(tmp_path / "run", {0: 0.25, 3: 0.75}, solved="1110")
    record = folder / "run" / "1"
    record.mkdir(parents=True)
    (record / "launch.json").write_text('{"platform": "cuda"}')
    (record / "config.yaml").write_text("trainer: {nnodes: 2, n_gpus_per_node: 4}")
    heading, cells = rows(Figures("One?", METRICS, [0], {"team": [read_result(folder, METRICS)]}))
    assert (heading[-1], cells[-1]) == ("GPU-hours, all seeds", "4.00")


def test_one_pair_has_a_difference_and_no_interval():
    figures = Figures("Payoff?", ["val/accuracy"], [0], {"first": [result("0")], "second": [result("1")]})
    heading, _, second = rows(figures)
    assert second[heading.index("minus first")] == "+1.000" and "95% interval" not in heading


def test_runs_without_tokens_have_their_steps_and_several_metrics_their_mean(tmp_path):
    lines = [{"step": s, "agent/a/reward/mean": s, "agent/b/reward/mean": s + 1.0} for s in (0, 50)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_result(tmp_path, ["agent/*/reward/mean"])
    assert found.curves["agent/*/reward/mean"] == [(0, 0.5), (50, 50.5)] and found.score == 50.5
    with pytest.raises(UserError, match=r"metrics.jsonl: has no episode/accuracy; correct `metrics` of the study"):
        read_result(tmp_path, METRICS)


def test_answers_are_those_of_the_graded_episodes_by_problem(tmp_path):
    graded, lost = {"metrics": {"is_correct": True}}, {"error": "sandbox fault"}
    items = [{"prompt": "same", "sample_index": i} | (lost if i == 1 else graded) for i in (0, 1, 2)]
    (tmp_path / "results.json").write_text(json.dumps([*items, *items[:1], {"prompt": "other", **graded}]))
    counts = {name: len(found) for name, found in read_answers(tmp_path).items()}
    assert counts == {"0: same": 2, "1: same": 1, "2: other": 1}


def test_pairs_of_problems_narrow_the_interval_of_a_difference():
    first = [result("1100" * 16), result("1010" * 16)]
    same_and_one_more = [result("1110" * 16), result("1110" * 16)]
    others = [result("0111" * 16), result("0111" * 16)]
    near, far = paired_interval(first, same_and_one_more), paired_interval(first, others)
    assert near.value == far.value == pytest.approx(0.25)
    assert near.low < 0.25 < near.high and far.high - far.low > 1.5 * (near.high - near.low)
    unchanged = paired_interval(first, first)
    assert (unchanged.value, unchanged.low, unchanged.high) == (0, 0, 0)


def test_seeds_that_disagree_widen_the_interval_of_a_difference():
    first = [result("0" * 64)] * 3
    agreeing, disagreeing = [result("10" * 32)] * 3, [result("1" * 64), result("0" * 64), result("10" * 32)]
    narrow, wide = paired_interval(first, agreeing), paired_interval(first, disagreeing)
    assert narrow.value == wide.value == 0.5
    assert narrow.low > 0.35 and (wide.low, wide.high) == (pytest.approx(0, abs=0.1), pytest.approx(1, abs=0.1))


def test_arms_of_other_problems_are_not_compared():
    other = Result({}, {"elsewhere": 1.0}, 30, None, 0.0, 0)
    with pytest.raises(UserError, match="no validation problem in common"):
        paired_interval([result("1")], [other])


def test_the_table_compares_every_arm_with_the_first_at_the_tokens_of_the_shortest_run(tmp_path):
    runs = {"a_team": [result("1100", tokens=30)], "alone": [result("0111", tokens=40)]}
    figures = Figures("Team?", ["val/accuracy"], [0], runs)
    heading, team, alone = rows(figures)
    assert figures.budget == 30
    assert heading[4:8] == ["each seed", "minus a_team", "95% interval", "training tokens"]
    assert team[:5] == ["a_team", "0.000", "0.250", "0.500", "0.500"] and team[5:7] == ["", ""]
    assert alone[:6] == ["alone", "0.000", "0.281", "0.750", "0.750", "+0.250"]  # 15 of its 40 tokens
    assert alone[7:] == ["40", "5.0", "0.50"]
    assert markdown(figures).splitlines()[2].startswith("| a_team | 0.000 | 0.250 |")
    assert r"a\_team & 0.000" in latex(figures) and r"95\% interval" in latex(figures)
    write_report(figures, tmp_path)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "table.tex", "figure.png"}


def test_the_figure_has_a_curve_per_arm_with_its_seeds_range_and_a_point_for_a_vote():
    runs = [result("1100", tokens=30), result("1110", tokens=60)]
    vote = [Result({}, {"0": 1.0}, 30, None, 0.0, 0)] * 2
    (axes,) = draw(Figures("Team?", ["val/accuracy"], [0, 1], {"team": runs, "vote": vote})).axes
    (line, point), (band,) = axes.lines, axes.collections
    assert list(line.get_xdata()) == [0, 30] and list(line.get_ydata()) == pytest.approx([0, 0.4375])
    assert band.get_datalim(axes.transData).intervaly == pytest.approx([0, 0.5])
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([30], [1.0])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["team", "vote"]
