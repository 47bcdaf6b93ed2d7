from __future__ import annotations

import json

import pytest

from recipe.dag.report.viewer.page import write_page
from tests.report.conftest import OVERFLOW, SHOWN, flagged_run


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_the_audit_leads_from_a_rule_to_the_episodes_and_what_they_were_paid(opened, run, tmp_path, width, dark):
    file = tmp_path / "audit.html"
    write_page([flagged_run(run)], file)

    async def script(tab):
        await tab.press("8")
        await tab.until("document.querySelector('main .empty')?.textContent.includes('report.monitors=all')")
        await tab.call("Page.navigate", url=f"{file.as_uri()}#/audit")
        rows = "[...document.querySelectorAll('{} .row:not(.head), {} tbody tr')].map((one) => one.innerText)"
        rules, listed = (rows.replace("{}", place) for place in (".rules", ".compared"))
        await tab.until(f"{listed}.length === 2")
        tab.requests[:] = tab.requests[:1]
        assert [row.split("\t")[1:] for row in await tab.value(rules)] == [
            ["2", "0.00", "+0.25", "+0.25", "50 %"],
            ["1", "\u22121.33", "\u22120.50", "+0.83", "0 %"],
            ["2", "0.00", "+0.25", "+0.25", "50 %"],
        ]
        text = await tab.value("document.querySelector('main').textContent")
        shown = text.count(SHOWN[: SHOWN.index("evil")])
        assert shown == 4, "the rule in the table, below the curves and in the list, and a reason"
        assert "\x1b" not in text and "\u202e" not in text
        assert "step 10: the reward of check rises and accuracy does not" in text
        assert "Did not fire: tool_probe" in text and "hack/any" not in text
        await tab.until("document.querySelectorAll('.uplot').length === 1")
        assert await tab.value(OVERFLOW) and await tab.value("document.title") != "owned"
        for keys, address in (
            ("j", "#/audit/1/train/1-a/0/1"),
            ("j", "#/audit/2/train/2-b/1"),
            ("k", "#/audit/1/train/1-a/0/1"),
            (["Enter"], "#/episode/1/train/1-a/0/1"),
            ("8", "#/audit/1/train/1-a/0"),
        ):
            for key in keys:
                await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(address)}")
        await tab.until("document.querySelector('.rules') !== null")  # drawn after the address has changed
        await tab.value("document.querySelectorAll('.rules a')[1].click()")
        await tab.until(f"{listed}.length === 1")
        await tab.press("j")
        await tab.until("location.hash.startsWith('#/audit/2/train/2-b/1//')")
        await tab.value("document.querySelector('.compared .row a').click()")
        await tab.until("location.hash === '#/episode/2/train/2-b/1'")
        await tab.until("document.querySelector('.alarms')?.textContent.includes('flagged')")
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0

    opened(script, width=width, dark=dark)
