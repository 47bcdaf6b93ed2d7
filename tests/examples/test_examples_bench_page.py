from __future__ import annotations

import json
import re

import pytest

from examples import bench_page
from recipe.dag.report.viewer.page import WEB
from tests.browser import find


def test_it_prints_the_figures_of_each_screen(capsys):
    if find() is None:
        pytest.skip("no Chromium or Chrome on PATH, and CHROME is not set")
    bench_page.main(["--episodes", "40", "--seconds", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    assert "80 episodes" in lines[0] and lines[1].startswith("shown ")
    (names,) = re.findall(r"SCREENS = (\[.*?\])", (WEB / "route.js").read_text())
    assert [line.split()[0] for line in lines[2:]] == json.loads(names)
