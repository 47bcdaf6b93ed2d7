from __future__ import annotations

import json
import subprocess
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from recipe.dag.core.errors import UserError
from recipe.dag.report import curve
from recipe.dag.report.curve import draw_curve


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_points_keep_their_steps_and_skip_what_was_not_measured():
    lines = [{"step": 5, "x": 1.0}, {"step": 0, "x": 0.5}, {"step": 2}, {"step": 3, "x": None}, {"step": 5, "x": 2.0}]
    assert curve._points(lines, "x") == [(0, 0.5), (5, 2.0)]


def test_moving_average_looks_back_only():
    assert curve._moving_average([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def learning(steps: int) -> list[dict]:
    lines = [{"step": s, "episode/accuracy": 0.5, "agent/planner/reward/mean": 0.1 * s} for s in range(1, steps + 1)]
    lines[-1]["val/accuracy"] = 0.6
    return lines


FINE_TUNING = [{"step": 0, "val/loss": 3.0}, *({"step": s, "train/loss": 3 / s} for s in range(1, 9))]


@pytest.mark.parametrize("lines", [learning(1), learning(5), learning(60), FINE_TUNING], ids=["1", "5", "60", "loss"])
def test_a_picture_with_ink_comes_out_and_names_the_run(tmp_path, monkeypatch, lines):
    png = tmp_path / "curve.png"
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1])
    monkeypatch.chdir(tmp_path)
    draw_curve(write(tmp_path / "metrics.jsonl", lines).name, png)
    assert drawn[0].get_suptitle() == f"Learning curve of {tmp_path.parent.name}/{tmp_path.name}"
    image = imread(png)
    assert image.shape[:2] == (1050, 1350)
    assert image[..., :3].std() > 0.05


def test_a_line_that_is_still_being_written_is_left_for_the_next_time(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [{"step": 1, "episode/accuracy": 0.5}])
    path.write_text(path.read_text() + '{"step": 2, "epi')
    draw_curve(path, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_before_anything_is_measured_a_picture_says_so(tmp_path):
    draw_curve(write(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}]), tmp_path / "curve.png")
    assert imread(tmp_path / "curve.png").shape[:2] == (1050, 1350)


@pytest.mark.parametrize("content", ["loss: 3\n\n", '{"loss": 3}\n'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="metrics.jsonl: no line is a record of a run; pass the metrics.jsonl of a run"):
        draw_curve(path, tmp_path / "curve.png")


def test_without_matplotlib_a_line_says_what_to_install_and_how_to_draw_the_curve_afterwards(tmp_path, monkeypatch):
    path, png = write(tmp_path / "metrics.jsonl", learning(1)), tmp_path / "curve.png"
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fault = curve.why_not_drawn(path, png)
    command = f"python -m recipe.dag.report.curve {path} {png}"
    assert fault.endswith(f"; run `pip install matplotlib`, and then `{command}`") and not png.exists()


def test_as_a_command(tmp_path, capsys, zygote):
    path = write(tmp_path / "metrics.jsonl", [{"step": 1, "episode/accuracy": 0.5}])
    command = [zygote.python, "-m", "recipe.dag.report.curve", path, tmp_path / "curve.png"]
    assert subprocess.run(command).returncode == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert curve.main([str(tmp_path / "none"), str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none" in error
    assert curve.main([]) == 2
