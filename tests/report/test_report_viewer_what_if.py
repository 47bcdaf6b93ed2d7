from __future__ import annotations

import json

import pytest

from recipe.dag.report.viewer.page import write_page
from tests.report.conftest import HOSTILE, OVERFLOW


def _effect(step: int, at: str) -> dict:
    """What the file of effects has of one."""
    call = {"node": "plan", "agent": "plan", "turn": 0, "round": 0, "text": HOSTILE, "completion": None}
    return {
        **{"step": step, "split": "train", "uid": f"{step}-a", "index": 0, "at": [at, 0, 0], "agent": at},
        **{"change": {"kind": "say", "agent": "", "text": HOSTILE}, "weights": HOSTILE, "recorded": 1.0},
        **{"before": [1.0, 1.0], "after": [0.0, None], "interval": [-1.0, -1.0, -1.0], "repeats": True},
        **{"first": ["check", 0, 0], "episodes": [{"calls": [call]}, {"calls": [{**call, "text": ""}]}]},
    }


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_what_if_shows_effects_beside_the_record_as_text(opened, run, tmp_path, width, dark):
    file = tmp_path / "what_if.html"
    write_page([run, run], file, [_effect(step, at) for step in (1, 2) for at in ("plan", "check")])

    async def script(tab):
        await tab.call("Page.navigate", url=file.as_uri())
        await tab.until("location.hash === '#/what-if'")
        tab.requests[:] = tab.requests[:1]
        await tab.press("j")
        await tab.until("location.hash === '#/what-if/1/train/1-a/0/0'")
        await tab.press("j")
        await tab.until("location.hash === '#/what-if/1/train/1-a/0/1'")
        rows = "[...document.querySelectorAll('[aria-label=continuation] tbody tr')].map((row) => row.textContent)"
        await tab.until(f"{rows}[1]?.includes('the fork')")  # no longer the effect before
        plan, check = await tab.value(rows)
        assert "from plan" in plan and "owned" in plan and "\x1b" not in plan and "\u202e" not in plan
        assert "not called" in check
        await tab.value("document.querySelectorAll('[aria-label=continuation] button')[1].click()")
        await tab.until(f"{rows}[0].includes('(silent)')")
        cell = "document.querySelector('[data-effect=\"3\"]').textContent"
        assert "1.00 \u2192 0.00" in await tab.value(cell) and "then another answer: check" in await tab.value(cell)
        assert await tab.value(OVERFLOW) and await tab.value("document.title") != "owned"
        for key, screen in (
            ("7", "#/what-if/1/train/1-a/0/1"),
            ("4", "#/episode/1/train/1-a/0/1"),
            ("7", "#/what-if/1/train/1-a/0/1"),
            ("k", "#/what-if/1/train/1-a/0/0"),
            ("4", "#/episode/1/train/1-a/0/0"),
            ("}", "#/episode/2/train/2-a/0/0"),
            ("7", "#/what-if/2/train/2-a/0/2"),
            ("5", "#/tokens/2/train/2-a/0/0"),
            ("7", "#/what-if/2/train/2-a/0/2"),
            ("r", "#/2/episode/2/train/2-a/0/0"),
            ("r", "#/episode/2/train/2-a/0/0"),
            ("7", "#/what-if/2/train/2-a/0/2"),
            ("9", "#/compare//train///0"),
        ):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")

    opened(script, width=width, dark=dark)
