from __future__ import annotations

import json
from dataclasses import replace

import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.report.run_folder import read_run
from recipe.dag.report.viewer.page import write_page
from tests.report.conftest import HOSTILE, OVERFLOW, SHOWN, build_call, build_episode, build_sibling, visit


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_runs_are_compared_at_equal_tokens_and_problem_by_problem(opened, run, tmp_path, width, dark):
    file, other = tmp_path / "compare.html", Journal(tmp_path / "other")
    for step, problem in ((1, "b"), (2, "a")):  # it has sampled less, and solves all of b but nothing of a
        group = [build_sibling(f"{step}-{problem}", problem, index) for index in range(4)]
        other.episodes(step, [replace(one, outcome=float(problem == "b")) for one in group])
        other.metrics(step, {"episode/accuracy": 0.5, "episode/count": 4.0, "tokens/sampled": 40.0})
    hostile = build_episode(HOSTILE, calls=[build_call(HOSTILE, text=HOSTILE)], sample=run.records[-1]["sample"])
    other.episodes(2, [hostile], split="validation")
    write_page([run, read_run(tmp_path / "other")], file)

    async def script(tab):
        await tab.call("Page.navigate", url=file.as_uri())
        await tab.until("location.hash === '#/compare'")
        tab.requests[:] = tab.requests[:1]
        await tab.until("document.querySelector('.steps b').textContent === '80'")
        cells = "[...document.querySelectorAll('tbody tr')].map((row) => row.children[3].textContent).join()"
        assert await tab.value(cells) == "1,2", "the steps that 80 tokens reach"
        await visit(tab, "#/compare/120")
        await tab.until("document.querySelector('.compared .problem')?.textContent.includes('owned')")
        await tab.press("j")
        await tab.until("document.querySelector('section[aria-label=problem] tbody tr') !== null")
        assert SHOWN[:20] in await tab.value("document.querySelector('section[aria-label=problem] tbody').textContent")
        await tab.value(
            "[...document.querySelectorAll('.compared button')].find((one) => /train/.test(one.innerText)).click()"
        )
        await tab.until("location.hash === '#/compare/120/train'")
        await visit(tab, "#/compare/120/train///1")
        for key, screen in (("9", "#/compare/120/train///1"), ("5", "#/tokens/2/train/2-a/0/0")):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")
        await visit(tab, "#/compare/120/train")
        await tab.press("1")
        await tab.until("location.hash === '#/run'")
        await visit(tab, "#/compare//train")
        row = "[...document.querySelectorAll('.compared .row:not(.head)')].map((one) => one.textContent).join()"
        await tab.until(f"{row} === 'problem a500,problem b50100'")
        await tab.press("j")
        await tab.press("j")
        await tab.until("location.hash === '#/compare//train///1'")
        said = "[...document.querySelectorAll('[aria-label=problem] tbody tr')].map((row) => row.textContent).join()"
        await tab.until(f"{said}.includes('the same')")
        assert await tab.value("document.querySelectorAll('.history .cell.faint').length") == 1
        link = "document.querySelector('[aria-label=problem] thead th:last-child a')"
        await tab.until(f"{link}?.hash === '#/2/episode/1/train/1-b/0'")
        await tab.value(f"{link}.click()")
        await tab.until("location.hash === '#/2/episode/1/train/1-b/0'")
        await tab.press("r")
        await tab.until("location.hash === '#/episode/1/train/1-b/0'")
        await tab.press("}")
        await tab.until("location.hash === '#/episode/2/train/2-b/0'")
        choose = "(one) => { one.value = '1'; one.dispatchEvent(new Event('change')); }"
        await tab.value(f"({choose})(document.querySelector('nav select'))")
        await tab.until("location.hash === '#/2/episode/1/train/1-b/0'")
        for key, screen in (("3", "#/2/group/1/train/1-b/0"), ("1", "#/2/run/1"), ("9", "#/2/compare")):
            await tab.press(key)
            await tab.until(f"location.hash === {json.dumps(screen)}")
            assert await tab.value(OVERFLOW), screen
        assert await tab.value("document.title") != "owned"
        assert await tab.value("document.querySelectorAll('main img, main script').length") == 0

    opened(script, width=width, dark=dark)
