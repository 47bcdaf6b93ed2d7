from __future__ import annotations

import errno
import json
import logging
import os

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.report.journal import Journal, read_records
from tests.episode.records import episode_from_json


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def full_disk(monkeypatch):
    """Lets `room` bytes of each line through, then fails as a full disk does; `room` None: the disk is well."""
    disk = {"room": None}
    write = os.write

    def limited(handle, data):
        if disk["room"] is None:
            return write(handle, data)
        if disk["room"] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data[: disk["room"]])
        disk["room"] = 0
        return write(handle, part)

    monkeypatch.setattr(os, "write", limited)
    return disk


def test_an_episode_comes_back_as_it_was(tmp_path, make_episode, make_call, make_result):
    journal = Journal(tmp_path / "run")
    episode = make_episode(calls=[make_call(tool_results=[make_result()], text="line\nbreak")], outcome=1.0)
    assert journal.episodes(3, [episode])
    (line,) = lines_of(journal.episodes_path)
    assert (line.pop("step"), line.pop("split")) == (3, "train")
    assert episode_from_json(line) == episode


def test_files_that_an_environment_fetched_are_cut(tmp_path, make_episode, make_call):
    info = {"fetched": {"submission.csv": "x" * 1_000_000, "a.txt": "short"}, "made": ["a.txt"], "over": False}
    journal, episode = Journal(tmp_path), make_episode(calls=[make_call(env_info=info)])
    journal.episodes(1, [episode])
    (line,) = lines_of(journal.episodes_path)
    kept = line["calls"][0]["env_info"]
    assert kept["fetched"]["submission.csv"].endswith("x\n[... 980000 characters cut]")
    assert kept["fetched"]["a.txt"] == "short" and kept["made"] == ["a.txt"] and kept["over"] is False
    assert len(info["fetched"]["submission.csv"]) == 1_000_000, "rewards still read it"


def test_metrics_are_null_where_they_are_not_finite(tmp_path):
    journal = Journal(tmp_path)
    journal.metrics(1, {"episode/accuracy": 0.5, "loss": float("nan"), "norm": float("inf")})
    journal.metrics(2, {"val/accuracy": 1.0})
    assert lines_of(journal.metrics_path) == [
        {"step": 1, "episode/accuracy": 0.5, "loss": None, "norm": None},
        {"step": 2, "val/accuracy": 1.0},
    ]


def test_episodes_are_capped_per_step_and_split(tmp_path, make_episode):
    journal = Journal(tmp_path, max_per_step=2)
    assert [journal.episodes(1, [make_episode(index=i)]) for i in range(3)] == [1, 1, 0]
    assert journal.episodes(1, [make_episode()], split="val")
    assert journal.episodes(2, (make_episode(index=i) for i in range(5))) == 2
    told = [(line["step"], line["split"]) for line in lines_of(journal.episodes_path)]
    assert told == [(1, "train"), (1, "train"), (1, "val"), (2, "train"), (2, "train")]


def test_forks_are_kept_whole_and_take_no_episodes_place(tmp_path, make_episode):
    """Of four episodes with two forks each, three are kept, and the forks of the first two: they are three or more."""
    step = [make_episode(index=k, forked={"from": k % 4, "at": "x"} if k > 3 else None) for k in range(12)]
    step.sort(key=lambda episode: (episode.index % 4, episode.index))
    journal = Journal(tmp_path, max_per_step=3)
    assert journal.episodes(1, step) == 7 and not journal.episodes(1, step)
    assert [line["index"] for line in lines_of(journal.episodes_path)] == [0, 4, 8, 1, 5, 9, 2]


def test_resuming_drops_later_steps_and_the_torn_line(tmp_path, make_episode):
    first = Journal(tmp_path, max_per_step=1)
    for step in range(4):
        first.episodes(step, [make_episode(f"u{step}")])
        first.metrics(step, {"x": step})
    for path in (first.episodes_path, first.metrics_path):
        with path.open("ab") as file:
            file.write(b'{"step": 2, "x": ')
    resumed = Journal(tmp_path, max_per_step=1)
    resumed.truncate_after(2)
    assert [line["step"] for line in lines_of(resumed.episodes_path)] == [0, 1, 2]
    assert [line["step"] for line in lines_of(resumed.metrics_path)] == [0, 1, 2]
    resumed.episodes(3, [make_episode("again")])
    assert lines_of(resumed.episodes_path)[-1]["uid"] == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["episodes.jsonl", "metrics.jsonl"]


def test_a_whole_last_line_without_its_newline_is_torn_too(tmp_path):
    journal = Journal(tmp_path)
    journal.metrics(1, {})
    with journal.metrics_path.open("ab") as file:
        file.write(b'{"step": 1}')
    journal.truncate_after(1)
    journal.metrics(2, {})
    assert lines_of(journal.metrics_path) == [{"step": 1}, {"step": 2}]


def test_truncating_what_is_not_there_makes_nothing(tmp_path):
    Journal(tmp_path).truncate_after(5)
    assert list(tmp_path.iterdir()) == []


def test_the_cap_starts_anew_for_the_steps_that_were_dropped(tmp_path, make_episode):
    journal = Journal(tmp_path, max_per_step=1)
    assert journal.episodes(1, [make_episode()]) and journal.episodes(2, [make_episode()])
    journal.truncate_after(1)
    assert not journal.episodes(1, [make_episode()])
    assert journal.episodes(2, [make_episode()])


def test_a_full_disk_warns_once_and_leaves_whole_lines(tmp_path, make_episode, full_disk, caplog):
    journal = Journal(tmp_path)
    assert journal.episodes(1, [make_episode("before")])
    with caplog.at_level(logging.WARNING):
        full_disk["room"] = 20
        assert not journal.episodes(1, [make_episode("torn")])
        assert not journal.episodes(1, [make_episode("refused")])
    assert len(caplog.records) == 1 and "episodes.jsonl" in caplog.text
    full_disk["room"] = None
    assert journal.episodes(1, [make_episode("after")])
    assert [line["uid"] for line in lines_of(journal.episodes_path)] == ["before", "after"]


def test_metrics_that_cannot_be_kept_are_an_error(tmp_path, full_disk):
    journal = Journal(tmp_path)
    full_disk["room"] = 0
    with pytest.raises(OSError):
        journal.metrics(1, {})


DAMAGED = ("{", "[]", '{"x": 1}', '{"step": "1"}', '{"step": null}', "[" * 100_000, "\0")


def test_damaged_lines_are_left_out_with_a_warning_that_counts_them(tmp_path, caplog):
    journal = Journal(tmp_path)
    lines = [*DAMAGED, '{"step": 1}', "", '{"step": 2}']
    journal.metrics_path.write_text("\n".join(lines) + '\n{"step": 2, ')
    with caplog.at_level(logging.WARNING):
        assert [record["step"] for record in read_records(journal.metrics_path, "pass another")] == [1, 2]
        journal.truncate_after(1)
    assert [line["step"] for line in lines_of(journal.metrics_path)] == [1]
    warning = f"{journal.metrics_path}: {len(DAMAGED)} damaged lines left out"
    assert [record.getMessage() for record in caplog.records] == [warning] * 2


def test_a_file_of_something_else_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(UserError, match=r"a\.jsonl: no line is a record of a run; pass another"):
        list(read_records(tmp_path / "a.jsonl", "pass another"))


def test_a_compressed_journal_reads_and_resumes_like_a_plain_one(tmp_path, make_episode, caplog):
    journal = Journal(tmp_path, max_per_step=None, compress=True)
    for step in range(3):
        assert journal.episodes(step, [make_episode(f"u{step}", index) for index in range(100)]) == 100
    with journal.episodes_path.open("ab") as file:
        file.write(journal.episodes_path.read_bytes()[:200])
    with caplog.at_level(logging.WARNING):
        journal.truncate_after(1)
    assert "cut off" in caplog.text
    journal.episodes(2, [make_episode("again")])
    uids = [record["uid"] for record in read_records(journal.episodes_path, "pass another")]
    assert uids == ["u0"] * 100 + ["u1"] * 100 + ["again"]
    assert [path.name for path in tmp_path.iterdir()] == ["episodes.jsonl.gz"]


def test_episodes_that_a_full_disk_cuts_off_leave_the_compressed_file_whole(tmp_path, make_episode, full_disk):
    journal = Journal(tmp_path, compress=True)
    assert journal.episodes(1, [make_episode("before")])
    full_disk["room"] = 20
    assert not journal.episodes(1, [make_episode("torn")])
    full_disk["room"] = None
    assert journal.episodes(1, [make_episode("after")])
    assert [record["uid"] for record in read_records(journal.episodes_path, "pass")] == ["before", "after"]
