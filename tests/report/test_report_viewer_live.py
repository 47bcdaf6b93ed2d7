"""The data of a run while it is written, as `verl-dag watch` reads it."""

from __future__ import annotations

import gzip
import json

import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.report.run_folder import read_run
from recipe.dag.report.viewer.live import LiveRun
from recipe.dag.report.viewer.payload import parts_of


@pytest.fixture
def group(make_episode, make_call):
    def episodes(uid: str, count: int = 2):
        return [make_episode(uid, index, calls=[make_call(text=f"{uid} {index}")]) for index in range(count)]

    return episodes


def joined(before: dict, news: dict) -> dict:
    """What the page knows after the news."""
    lists = {name: before[name][: news["from"][name]] + news[name] for name in ("episodes", "problems")}
    return {**news, **lists}


@pytest.mark.parametrize("compress", [False, True])
def test_the_parts_of_a_growing_run_are_those_of_the_finished_one(tmp_path, group, compress):
    live, journal = LiveRun(tmp_path / "run"), None
    known = live.news()
    assert known["episodes"] == [] and known["metrics"]["steps"] == [] and live.news(known["version"]) is None
    for step in range(3):
        journal = journal or Journal(tmp_path / "run", compress=compress)
        journal.episodes(step, group(f"u{step}"))
        journal.metrics(step, {"loss": float(step)})
        news = live.news(known["version"])
        assert [episode["step"] for episode in news["episodes"]] == [step] * 2, "only what is new is sent"
        known = joined(known, news)
        journal.episodes(step, group("v", 1), split="validation")
        known = joined(known, live.news(known["version"]))
    whole = parts_of(read_run(tmp_path / "run"))
    live_only = {"from", "version"}
    assert {key: value for key, value in known.items() if key not in live_only} == whole["index"]
    assert {name for name in whole if name.startswith("chunk")} == {f"chunk-{number}" for number in range(6)}
    for number in range(6):
        chunk, expected = live.part(f"chunk-{number}"), whole[f"chunk-{number}"]
        strip = [{k: v for k, v in episode.items() if k != "run"} for episode in expected["episodes"]]
        assert chunk == expected | {"episodes": strip}
    with pytest.raises(KeyError):
        live.part("chunk-6")


def test_half_a_line_is_read_when_it_is_whole(tmp_path, group, caplog):
    Journal(tmp_path / "other").episodes(1, group("u"))
    first, second = (tmp_path / "other" / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    file, metrics = tmp_path / "episodes.jsonl", tmp_path / "metrics.jsonl"
    live = LiveRun(tmp_path)
    file.write_bytes(first + second[:100])
    metrics.write_bytes(b'{"step": 1, "lo')
    known = live.news()
    assert len(known["episodes"]) == 1 and known["metrics"]["steps"] == [] and not caplog.records
    file.write_bytes(first + second)
    metrics.write_bytes(b'{"step": 1, "loss": 2.0}\n')
    news = live.news(known["version"])
    assert [one["index"] for one in news["episodes"]] == [1] and news["metrics"]["series"] == {"loss": [2.0]}
    assert len(live.part("chunk-0")["episodes"]) == 2


def test_a_compressed_batch_that_is_cut_off_is_read_when_it_is_whole(tmp_path, group, caplog):
    Journal(tmp_path / "other").episodes(1, group("u"))
    batch = gzip.compress((tmp_path / "other" / "episodes.jsonl").read_bytes())
    live, file = LiveRun(tmp_path), tmp_path / "episodes.jsonl.gz"
    file.write_bytes(batch[: len(batch) // 4])
    known = live.news()
    file.write_bytes(batch)
    known = joined(known, live.news(known["version"]))
    assert len(known["episodes"]) == 2 and not caplog.records


def test_compressed_batches_are_decompressed_once(tmp_path, group):
    live, journal = LiveRun(tmp_path), Journal(tmp_path, compress=True)
    journal.episodes(1, group("u"))
    known = live.news()
    with journal.episodes_path.open("r+b") as file:
        file.write(b"damaged, and of no interest any more")
    for step in (2, 3):
        journal.episodes(step, group(f"u{step}"))
        news = live.news(known["version"])
        assert [one["uid"] for one in news["episodes"]] == [f"u{step}"] * 2
        known = joined(known, news)
    assert live.part("chunk-2")["episodes"][1]["calls"][0]["text"] == "u3 1"


def test_a_resumed_run_is_read_anew(tmp_path, group):
    live, journal = LiveRun(tmp_path), Journal(tmp_path)
    for step in (1, 2):
        journal.episodes(step, group(f"u{step}"))
        journal.metrics(step, {"loss": 1.0})
    known = live.news()
    journal.truncate_after(1)
    journal.episodes(2, group("again"))
    news = live.news(known["version"])
    assert news["from"] == {"episodes": 0, "problems": 0} and news["metrics"]["steps"] == [1]
    assert [one["uid"] for one in news["episodes"]] == ["u1", "u1", "again", "again"]
    assert live.part("chunk-1")["episodes"][0]["calls"][0]["text"] == "again 0"


def test_a_run_in_the_place_of_a_removed_one_is_read_anew(tmp_path, group):
    folder = tmp_path / "run"
    Journal(folder).episodes(1, group("old"))
    live = LiveRun(folder)
    known = live.news()
    for number in range(3):  # file systems give the inode of a removed file to the next one
        (folder / "episodes.jsonl").unlink()
        Journal(folder).episodes(1, group(f"longer than before {number}", 3))
        news = live.news(known["version"])
        assert news["from"] == {"episodes": 0, "problems": 0} and len(news["episodes"]) == 3
        known = news


def test_lines_that_are_no_records_are_left_out(tmp_path, group):
    journal = Journal(tmp_path)
    journal.episodes(1, group("u", 1))
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write("damaged\n[]\n" + json.dumps({"step": 1, "uid": "no calls"}) + "\n")
    journal.episodes(1, group("v", 1))
    live = LiveRun(tmp_path)
    assert [one["uid"] for one in live.news()["episodes"]] == ["u", "v"]
    assert [one["uid"] for one in live.part("chunk-0")["episodes"]] == ["u", "v"]


def test_a_version_that_is_none_is_a_value_error(tmp_path):
    with pytest.raises(ValueError):
        LiveRun(tmp_path).news("a.b.c")
