"""A killed evaluation goes on where it was, repeats only errors, and never mixes two evaluations."""

from __future__ import annotations

import json

import pytest

from recipe.dag.report.evaluation_log import EvaluationLog, episode_from
from recipe.dag.report.jsonfile import to_json
from recipe.dag.train.evaluation import determining
from recipe.dag.types.record import Call, Episode, Result, Skip, ToolResult

IDENTITY = {"workflow": "w", "n": 2, "seed": 0}


def episode(uid: str, index: int = 0, fault: dict | None = None) -> Episode:
    tool = ToolResult("code_interpreter", {"code": "1"}, "success", "1")
    call = Call("n", "a", 0, "p", 0, prompt_ids=[1], response_ids=[2], tool_results=[tool], prompt_text="text")
    return Episode(
        uid,
        index,
        {"prompt": [{"role": "user", "content": "?"}]},
        calls=[call],
        results=[Result("v", 0, 0, "x", {})],
        skips=[Skip("s", "", 0, 0, "when")],
        outcome=1.0,
        fault=fault,
    )


def test_an_episode_survives_the_file():
    before = episode("val-0")
    after = episode_from(json.loads(to_json(before.to_json() | {"of_a_later_version": 1})))
    assert after == before


def test_finished_episodes_are_kept_and_errors_are_repeated(tmp_path):
    log = EvaluationLog(tmp_path, IDENTITY)
    assert log.finished == {}
    log.add(episode("val-0"))
    log.add(episode("val-1", fault={"boundary": "env", "message": "down"}))
    log.add(episode("val-1", 1))
    with log.path.open("ab") as file:
        file.write(b'{"step": 0, "uid": "val-2"')  # killed while writing
    again = EvaluationLog(tmp_path, IDENTITY)
    assert again.finished.keys() == {("val-0", 0), ("val-1", 1)}
    assert len(log.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("field", [{"calls": 5}, {"calls": [5]}, {"calls": [{}]}, {"outcome": "1"}, {"uid": ["a"]}])
def test_a_line_of_another_type_is_run_again_with_a_warning(tmp_path, caplog, field):
    log = EvaluationLog(tmp_path, IDENTITY)
    log.add(episode("val-0"))
    log.add(episode("val-1"))
    first, second = log.path.read_text().splitlines()
    log.path.write_text(f"{first}\n{json.dumps(json.loads(second) | field)}\n")
    assert EvaluationLog(tmp_path, IDENTITY).finished.keys() == {("val-0", 0)}
    assert "episodes.jsonl: 1 damaged line left out; their episodes are run again" in caplog.text


@pytest.mark.parametrize("other", [{"seed": 1}, {"workflow": "v"}])
def test_another_evaluation_starts_over_and_the_file_of_the_first_is_kept(tmp_path, other, capsys):
    EvaluationLog(tmp_path, IDENTITY).add(episode("val-0"))
    kept = (tmp_path / "episodes.jsonl").read_bytes()
    assert EvaluationLog(tmp_path, IDENTITY | other).finished == {}
    assert (tmp_path / "episodes.1.jsonl").read_bytes() == kept
    assert "episodes.1.jsonl" in capsys.readouterr().out
    assert EvaluationLog(tmp_path, IDENTITY).finished == {} and not (tmp_path / "episodes.2.jsonl").exists()


def test_fewer_episodes_are_a_part_of_the_file(tmp_path):
    log = EvaluationLog(tmp_path, IDENTITY)
    for index in range(3):
        log.add(episode("val-0", index))
    again = EvaluationLog(tmp_path, IDENTITY)
    again.limit(2)
    assert again.finished.keys() == {("val-0", 0), ("val-0", 1)}
    assert len(again.path.read_text().splitlines()) == 3


def test_limits_and_the_servers_address_do_not_determine_an_episode():
    def items(url: str, timeout_s: float, model: str = "m", n: int = 1) -> dict:
        policies = {"main": {"api": {"base_url": url, "model": model}}, "other": {"api": None}}
        workflow = {"episode": {"timeout_s": timeout_s, "max_turns": 1}, "policies": policies}
        return {"learned": {"workflow": workflow}, "validation": {"validation.n": n}}

    first = items("http://a/v1", 300.0)
    assert determining(first) == determining(items("http://b/v1", 600.0, n=64))
    assert determining(first) != determining(items("http://a/v1", 300.0, model="other"))
    assert first == items("http://a/v1", 300.0), "unchanged"


def test_episodes_of_a_folder_without_the_mark_are_not_trusted(tmp_path):
    (tmp_path / "episodes.jsonl").write_bytes(to_json({"step": 0} | episode("val-0").to_json()) + b"\n")
    assert EvaluationLog(tmp_path, IDENTITY).finished == {}
