"""The table and figure of the played games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.dag.core.user_code import load_object

GAMES = Path(__file__).resolve().parents[2] / "examples" / "games"


@pytest.fixture
def curves():
    return load_object("curves.py", GAMES)


def write(folder: Path, name: str, payoffs: list[float]) -> None:
    lines = [{"step": 0, "val/agent/one/reward/mean": 9.0}]
    lines += [
        {"step": step, "agent/one/reward/mean": p, "agent/two/reward/mean": p, "episode/reward": 2 * p}
        for step, p in enumerate(payoffs, start=1)
    ]
    (folder / f"games_{name}").mkdir(parents=True)
    (folder / f"games_{name}" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_seeds_of_a_game_are_one_line_over_the_steps_that_all_have(curves, tmp_path, capsys):
    write(tmp_path, "relay_3", [0.25, 0.5, 1.0])
    write(tmp_path, "relay_3_seed1", [0.75, 0.5])
    write(tmp_path, "anti_coordination_shared", [0.5] * 12)
    (tmp_path / "games_data").mkdir()
    assert curves.main(["--runs", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| anti_coordination_shared | 1 | 12 | 0.50 | 0.50 | 1 |",
        "| relay_3 | 2 | 2 | 0.50 | 0.50 | 1 |",
    ]
    assert (tmp_path / "out/played.md").read_text().splitlines() == lines
    assert (tmp_path / "out/played.png").read_bytes().startswith(b"\x89PNG")


def test_first_and_last_steps_are_means(curves):
    played = {"climbing_sequential": [[-10.0, -8.0, -6.0, -4.0, -2.0, 1.0, 2.0, 3.0, 4.0, 5.0]]}
    assert curves.table(played).splitlines()[2] == "| climbing_sequential | 1 | 10 | -6.00 | 3.00 | 11 |"


def test_what_is_no_game_is_left_out_and_nothing_at_all_is_an_error(curves, tmp_path, capsys):
    write(tmp_path, "chess", [1.0])
    assert curves.main(["--runs", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "no run of a game; start one: bash examples/games/run_tiny_cpu.sh" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_game_that_the_script_plays_has_a_panel(curves):
    script = (GAMES / "run_tiny_cpu.sh").read_text()
    games = script.partition('games="')[2].partition('"')[0].split()
    assert len(games) >= 14 and {curves.game_of(game) for game in games} == set(curves.BEST)
