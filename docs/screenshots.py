"""Make the pictures of docs/trace.md: `python docs/screenshots.py RUN`.

It needs a Chromium or Chrome on PATH, or in CHROME. RUN is the output folder of the tiny run,
`bash recipe/retool_ma/run_tiny_cpu.sh`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import browser, find  # noqa: E402

from recipe.dag.report.run_folder import read_run  # noqa: E402
from recipe.dag.report.viewer.page import write_page  # noqa: E402


async def main(folder: Path) -> None:
    executable = find()
    if executable is None:
        raise SystemExit("no Chromium or Chrome on PATH; CHROME names one")
    run = read_run(folder)
    unsolved = next(one for one in run.records if one["split"] == "train" and one["outcome"] == 0.0)
    episode = f"#/episode/{unsolved['step']}/train/{unsolved['uid']}/{unsolved['index']}/1"
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "trace.html"
        print(write_page([run], page))
        async with browser(executable) as new_tab:
            for name, route, height, dark in (("run", "#/run/15", 900, False), ("episode", episode, 900, True)):
                tab = await new_tab()
                await tab.open(f"{page.as_uri()}{route}", width=1200, height=height, dark=dark)
                await tab.until("document.querySelector('[role=status].empty') === null")
                await asyncio.sleep(0.5)  # charts draw in the next frames
                await tab.picture(ROOT / "docs" / f"trace_{name}.png")
                await tab.close()


asyncio.run(main(Path(sys.argv[1])))
