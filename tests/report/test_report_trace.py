from __future__ import annotations

import io
import json
from html import unescape
from xml.etree import ElementTree

import pytest
from rich.console import Console

from recipe.dag.core.errors import UserError
from recipe.dag.report.episodes import Wanted, choose, list_episodes, read_records, select
from recipe.dag.report.journal import Journal
from recipe.dag.report.jsonfile import to_json
from recipe.dag.report.trace import show, write_svg
from recipe.dag.types.record import Call, Episode, Skip, ToolResult


def episode(uid: str = "a", *, outcome: float | None = 1.0, text: str = "42", **fields) -> Episode:
    tool = ToolResult("code_interpreter", {"code": "print(6 * 7)", "timeout": 5}, "success", "42\n")
    call = Call("solve", "solver", 0, "main", 0, response_mask=[1, 1, 0], text=text, tool_results=[tool])
    call.reward, call.advantage = 1.0, 0.5
    sample = {"prompt": [{"role": "user", "content": "What is 6 x 7?"}]}
    return Episode(uid, 0, sample, calls=[call], outcome=outcome, **fields)


@pytest.fixture
def folder(tmp_path):
    journal = Journal(tmp_path)
    journal.episodes(1, [episode("first"), episode("second", outcome=0.0)])
    journal.episodes(2, [episode("third", outcome=0.0), episode("fourth")])
    journal.episodes(2, [episode("fifth")], split="validation")
    return tmp_path


def printed(record, **options) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(record, console, **options)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("options", "uid"),
    [
        ({}, "third"),
        ({"step": 1}, "first"),
        ({"solved": True}, "fourth"),
        ({"solved": False, "step": 1}, "second"),
        ({"split": "validation"}, "fifth"),
        ({"uid": "first"}, "first"),
        ({"agent": "other"}, "other's"),
        ({"worst": True}, "fourth"),
        ({"worst": True, "split": "validation"}, "fifth"),
    ],
)
def test_an_episode_is_chosen_of_the_last_step_unless_a_step_or_a_sample_is_given(folder, options, uid):
    other = episode("other's")
    other.calls[0].agent = "other"
    records = [*read_records(folder)]
    records[3]["calls"][0]["reward"] = -1.0  # fourth
    records[2]["calls"][0]["reward"] = None
    records.insert(2, json.loads(to_json(other)) | {"step": 1})
    assert choose(records, Wanted(**options))["uid"] == uid


def test_the_next_of_those_that_match_is_chosen_by_its_position(folder):
    assert choose(read_records(folder), Wanted(), 1)["uid"] == "fourth"


def test_an_episode_that_was_not_recorded_is_an_error(folder):
    with pytest.raises(UserError, match="2 recorded episodes found; episode 7"):
        choose(read_records(folder), Wanted(step=1), 7)
    with pytest.raises(UserError, match="none of 5 recorded episodes matches"):
        choose(read_records(folder), Wanted(step=9))


def test_a_folder_without_a_journal_and_a_file_of_something_else_are_errors(tmp_path):
    with pytest.raises(UserError, match="pass the output folder of a run"):
        list(read_records(tmp_path))
    good = json.loads(to_json(episode())) | {"step": 1}
    wrong = {"calls": ["call"], "sample": [], "outcome": "solved"}
    for record in ({"step": 1}, {**good, "calls": None}, *({**good, name: value} for name, value in wrong.items())):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        with pytest.raises(UserError, match="metrics.jsonl: no line is a record of a run; .* its episodes.jsonl"):
            list(read_records(tmp_path / "metrics.jsonl"))


def test_the_torn_line_of_a_killed_run_is_left_out(folder):
    with (folder / "episodes.jsonl").open("a") as file:
        file.write('{"step": 3, "uid": ')
    assert len(list(read_records(folder))) == 5


def test_a_call_is_shown_with_its_tool_reward_and_advantage(folder):
    text = printed(choose(read_records(folder), Wanted(solved=True)))
    assert "step 2, train, sample fourth, episode 0: solved" in text
    assert "What is 6 x 7?" in text and "solve (solver)" in text
    assert 'code_interpreter {"timeout": 5}: success' in text and "  print(6 * 7)" in text and "> 42" in text
    assert "reward +1.00, advantage +0.50, 2 tokens" in text


def test_what_the_env_showed_an_agent_is_shown():
    record = episode()
    record.calls[0].observation = "You are at 3."
    assert "< You are at 3." in printed(record.to_json())


def test_validation_has_no_advantages(folder):
    assert "advantage" not in printed(choose(read_records(folder), Wanted(split="validation")))


def test_what_an_agent_wrote_is_printed_as_it_is():
    text = printed(json.loads(json.dumps(episode(text="[bold]no markup[/bold]").to_json())))
    assert "[bold]no markup[/bold]" in text


def test_nothing_in_a_record_reaches_a_terminal_or_breaks_a_picture(tmp_path):
    hostile = "\x1b[31m\x00\x9b2J\u202e\ud800\ufffe\r\u00e9\U0001f600"
    tool = ToolResult(hostile, {hostile: hostile}, "invalid", hostile)
    call = Call(hostile, hostile, 0, "main", 0, text=hostile, tool_results=[tool], stop_reason=hostile)
    fault = {"boundary": "tool", "where": hostile, "message": hostile}
    record = Episode(hostile, 0, {"prompt": hostile}, calls=[call], fault=fault).to_json()
    assert not set(printed(record)) & set("\x1b\x00\x9b\u202e\ud800\ufffe\r")
    write_svg(record, tmp_path / "trace.svg")
    assert "\u00e9" in "".join(ElementTree.parse(tmp_path / "trace.svg").getroot().itertext())


def test_long_texts_are_cut_in_the_middle_unless_all_is_asked_for():
    record = episode(text="a" * 3000 + "c" + "b" * 3000).to_json()
    assert "2001 characters" in printed(record)
    whole = printed(record, full=True)
    assert whole.count("a") > 3000 and whole.count("b") > 3000 and "characters" not in whole


def test_all_of_an_episode_is_its_prompts_truth_reward_parts_stop_reasons_and_cached_tokens():
    record = episode()
    record.sample["ground_truth"] = "42."
    call = record.calls[0]
    call.reward_parts, call.stop_reason, call.completion = {"score": 0.75, "team": 0.25}, "stop", "written"
    call.prompt_text, call.prompt_ids, call.cached_tokens = "<|user|> What?", [1, 2, 3], 2
    text = printed(record.to_json(), full=True)
    reward, cached = "reward: score +0.75, team +0.25", "prompt: 2 of 3 tokens cached"
    for part in ("ground truth: 42.", "<|user|> What?", reward, "passed on", "s, stop", cached):
        assert part in text and part not in printed(record.to_json())


def test_a_tool_that_was_asked_for_before_the_answer_comes_before_it():
    record = episode(text="the answer")
    call = record.calls[0]
    call.generations = 2
    asked, by_hook = call.tool_results[0], ToolResult("grader", {}, "success", "fine", generation=2)
    asked.generation, call.tool_results = 1, [asked, by_hook]
    text = printed(record.to_json())
    assert text.index("code_interpreter") < text.index("the answer") < text.index("grader")


def test_the_calls_of_one_agent_are_shown_alone():
    record = episode(text="mine")
    record.calls.append(Call("check", "checker", 1, "main", 0, text="another's"))
    text = printed(record.to_json(), agent="solver")
    assert "mine" in text and "another's" not in text


def test_a_list_has_the_rewards_of_each_agent_and_what_went_wrong(folder):
    records = select(read_records(folder), Wanted(step=1))
    other = {"agent": "checker", "reward": -2.0, "stop_reason": "length", "tool_results": []}
    records[1]["calls"].append(records[1]["calls"][0] | other)
    records[1]["calls"][0]["tool_results"][0]["status"] = "timeout"
    console = Console(file=io.StringIO(), width=200)
    console.print(list_episodes(records))
    header, first, second = console.file.getvalue().splitlines()
    assert header.split() == "step split sample outcome reward solver checker tokens s notes".split()
    assert first.split()[:7] == ["0", "1", "train", "first/0", "1", "+1.00", "+1.00"]
    assert "-1.00" in second and "-2.00" in second
    assert second.strip().endswith("solve: code_interpreter timeout, solve: length")


def test_a_picture_of_it_is_written(folder, tmp_path):
    write_svg(choose(read_records(folder), Wanted()), tmp_path / "trace.svg")
    svg = (tmp_path / "trace.svg").read_text()
    assert svg.startswith("<svg")
    title = f"{tmp_path.parent.name}/{tmp_path.name}, sample third, episode 0"
    assert title in unescape(svg).replace("\xa0", " ")
    assert "url(http" not in svg.replace('"', "")


def test_skips_and_the_fault_are_shown():
    record = episode(
        skips=[Skip("check", "checker", 0, 0, "when")],
        fault={"boundary": "tool", "where": "tool add", "message": "gone"},
    ).to_json()
    text = printed(record)
    assert "node check was skipped (when)" in text and "ended by a tool fault in tool add: gone" in text


def test_candidates_that_were_not_kept_follow_the_one_that_was():
    record = episode("a")
    kept = record.calls[0]
    kept.candidate, kept.candidates, kept.score = 1, 3, 0.9
    for index, score in ((0, 0.2), (2, None)):
        other = Call("solve", "solver", 0, "main", 0, text=f"other {index}", candidate=index, candidates=3, score=score)
        record.dropped.append(other)
    record.dropped.append(Call("judge", "judge", 1, "main", 0, text="elsewhere", candidate=0))
    text = printed(record.to_json())
    assert text.index("candidate 2 of 3, score +0.90") < text.index("other 0") < text.index("score +0.20")
    assert text.index("other 0") < text.index("other 2") < text.index("candidate 3 of 3, no score")
    assert "elsewhere" not in text
