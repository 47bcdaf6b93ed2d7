"""The page of `verl-dag trace -o` in a headless Chromium or Chrome, opened from disk."""

from __future__ import annotations

import json

import pytest

from tests.report.conftest import OVERFLOW, SHOWN, visit


def test_every_call_is_on_the_screen_of_its_episode_once(opened, run):
    async def script(tab):
        for record in run.records:
            if record["split"] == "train":
                await visit(tab, f"#/episode/{record['step']}/train/{record['uid']}/{record['index']}")
                title = f"{record['uid']}, number {record['index']}"
                await tab.until(f"document.querySelector('h1').textContent.includes({json.dumps(title)})")
                ids = await tab.value("[...document.querySelectorAll('[data-call]')].map((one) => one.dataset.call)")
                assert ids == ["0", "1"]

    opened(script)


def test_hostile_texts_are_shown_as_text(opened):
    async def script(tab):
        for key in "354":
            await tab.press(key)
            await tab.until("document.querySelector('main h1')?.textContent.includes('evil')")
        await tab.press("Escape")
        await tab.press("j")
        await tab.until("document.querySelector('.detail') !== null")
        text = await tab.value("document.querySelector('main').textContent")
        assert text.count(SHOWN) >= 6 and "\x1b" not in text and "\u202e" not in text
        assert len(text) < 100_000, "a line of a megabyte is shown in part"
        await tab.value("document.querySelector('.tool-call .more').click()")
        await tab.until("document.querySelector('main').textContent.length > 30000")
        assert await tab.value("document.title") != "owned"
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0
        assert await tab.value(OVERFLOW)

    opened(script, "#/problems//validation", width=400)


def test_the_keyboard_leads_from_a_call_to_its_siblings_and_to_other_steps(opened):
    async def script(tab):
        async def pressed(keys: str, expected: str) -> None:
            for key in keys:
                await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(expected)}")

        await pressed("j", "#/episode/1/train/1-a/0/0")
        await pressed("j", "#/episode/1/train/1-a/0/1")
        await pressed("h", "#/episode/1/train/1-a/0/0")
        await pressed("l]", "#/episode/1/train/1-a/1/1")
        await pressed("}", "#/episode/2/train/2-a/1/1")
        await pressed("{[", "#/episode/1/train/1-a/0/1")
        await pressed("5", "#/tokens/1/train/1-a/0/1")
        await pressed("3", "#/group/1/train/1-a/0")
        await tab.press("?")
        await tab.until("document.querySelector('[role=dialog]').textContent.includes('search')")
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        await tab.until("document.querySelector('[role=dialog]') === null")
        await tab.press("/")
        await tab.until("document.activeElement.type === 'search'")
        await tab.call("Input.insertText", text="answer is 3")
        await tab.until("document.querySelectorAll('.hits a').length === 4")

    opened(script, "#/episode/1/train/1-a/0")


def test_a_link_opens_its_call(opened):
    async def script(tab):
        await tab.until("document.querySelector('#call-1 .detail') !== null")
        assert "the answer is 3" in await tab.value("document.querySelector('#call-1 .detail').textContent")
        assert await tab.value("document.querySelector('#call-0 .detail')") is None

    opened(script, "#/episode/2/train/2-b/3/1", dark=True)


def test_a_group_says_what_separated_the_solved_from_the_rest(opened):
    async def script(tab):
        await tab.until("document.querySelector('.siblings .snippet')?.textContent.includes('from plan')")
        text = await tab.value("document.querySelector('main').textContent")
        assert "check: reward of score" in text and "plan: tokens" not in text
        assert "first call whose texts differ is check" in text
        sums = "[...document.querySelectorAll('.siblings tbody tr')].map((row) => row.lastElementChild.textContent)"
        assert await tab.value(sums) == ["0.00", "0.00"]

    opened(script, "#/group/1/train/1-a")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_no_screen_is_wider_than_the_window(opened, width, dark):
    async def script(tab):
        for link, key in enumerate("1234568"):
            await tab.press(key)
            await tab.until(f"document.querySelectorAll('nav a')[{link}].ariaCurrent === 'true'")
            await tab.until("document.querySelector('main h1') !== null")
            assert await tab.value(OVERFLOW), key

    opened(script, width=width, dark=dark)
