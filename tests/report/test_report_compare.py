"""`verl-dag compare`: runs at equal numbers of generated tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app import cli
from recipe.dag.core.errors import UserError
from recipe.dag.report.compare import compare, lines_of, measures_of, read_validations


def run_in(folder: Path, tokens: list[int], accuracies: dict[int, float], **more: float) -> Path:
    """Write a run's metrics: step 0 is the validation before training, step k generated tokens[k - 1]."""
    folder.mkdir()
    lines = []
    for step, sampled in enumerate([0, *tokens]):
        line: dict[str, float] = {"step": step} | ({"tokens/sampled": sampled} if step else {})
        if step in accuracies:
            line |= {"val/accuracy": accuracies[step], "val/episode/count": 10, "val/tokens/sampled": 250}
            line |= {f"val/{key}": value for key, value in more.items()}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    cheap = run_in(tmp_path / "cheap", [100] * 6, {0: 0.1, 2: 0.3, 4: 0.4, 6: 0.5})
    dear = run_in(tmp_path / "dear", [250] * 4, {0: 0.2, 1: 0.6, 2: 0.7, 4: 0.9})
    return [cheap, dear]


def test_runs_are_compared_when_they_had_generated_equally_many_tokens(runs):
    compared = compare(runs)
    assert compared["budget"] == 600
    figures = [(row["step"], row["training_tokens"], row["accuracy"]) for row in compared["runs"]]
    assert figures == [(6, 600, 0.5), (2, 500, 0.7)], "not at their ends, where one had generated 1,000"
    earlier = compare(runs, 499)["runs"]
    assert [(row["step"], row["accuracy"]) for row in earlier] == [(4, 0.4), (1, 0.6)]


def test_measures_are_per_episode_and_weighted_by_tool_calls():
    line = {"val/accuracy": 0.5, "val/episode/count": 10, "val/tokens/sampled": 400}
    line |= {"val/agent/a/calls": 10, "val/agent/a/tool_calls": 2.0, "val/agent/a/invalid_calls": 0.5}
    line |= {"val/agent/a/tool_success": 1.0}
    line |= {"val/agent/b/calls": 5, "val/agent/b/tool_calls": 2.0, "val/agent/b/invalid_calls": 0.0}
    line |= {"val/agent/b/tool_success": 0.0, "val/agent/c/calls": 10}
    assert measures_of(line) == pytest.approx(
        {
            "accuracy": 0.5,
            "agent_calls": 2.5,
            "tokens": 40,
            "tool_calls": 3.0,
            "code_pass_rate": 0.5,  # 10 of a's 20 calls ran and passed, none of b's 10
            "invalid_rate": 1 / 3,
        }
    )


def test_a_run_without_tools_has_no_rate_rather_than_zero(runs):
    row = compare(runs)["runs"][0]
    assert not {"code_pass_rate", "invalid_rate", "tool_calls"} & row.keys()
    table = lines_of(compare(runs))
    assert "at most 600 generated tokens" in table[0] and table[2].split()[1:5] == ["6", "600", "50.0%", "-"]


def test_a_step_that_a_resumed_run_repeated_counts_once(tmp_path):
    run = run_in(tmp_path / "run", [100, 100], {2: 0.5})
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + text.splitlines()[-1] + "\n")
    assert read_validations(run)[-1].training_tokens == 200


def test_what_cannot_be_compared_is_one_line(tmp_path, runs):
    late = run_in(tmp_path / "late", [700], {1: 0.5})
    with pytest.raises(UserError, match="first validation comes after 700 .* more than the 600"):
        compare([*runs, late])
    with pytest.raises(UserError, match="No such file.* pass the output folder"):
        compare([tmp_path / "none"])
    with pytest.raises(UserError, match="no validation"):
        compare([run_in(tmp_path / "blind", [5], {})])
    (tmp_path / "torn.jsonl").write_text('{"step"')
    with pytest.raises(UserError, match="no line is a record of a run; pass the output folder of a training run"):
        compare([tmp_path / "torn.jsonl"])


def test_the_command_prints_the_table_and_writes_it(runs, tmp_path):
    out = tmp_path / "new" / "table.json"
    result = CliRunner().invoke(cli.app, ["compare", *map(str, runs), "-o", str(out)])
    assert result.exit_code == 0 and "cheap" in result.stdout and "70.0%" in result.stdout
    assert json.loads(out.read_text()) == compare(runs)


def test_the_command_alone_writes_nothing(runs, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert CliRunner().invoke(cli.app, ["compare", *map(str, runs)]).exit_code == 0
    assert not list(Path.cwd().iterdir())
