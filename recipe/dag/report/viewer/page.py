"""The page's file: the modules of `web/` and a run's data, joined.

Invariant: nothing between the page's own tags comes from a record, except as base64. The modules run as they are in
`web/`: an import map gives each import its module, as a data URL.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import writing
from recipe.dag.core.printable import printable
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.run_folder import Run
from recipe.dag.report.viewer.payload import parts_of

WEB = Path(__file__).parent / "web"
VENDORED = {
    "preact": "vendor/preact.js",
    "preact/hooks": "vendor/preact-hooks.js",
    "htm": "vendor/htm.js",
}
"""Bare import -> its file. uPlot is no module, and loaded as a script of the page."""
MAINS = ("start.js", "live.js")
"""Modules that start a page: one that is a file, one that asks a server."""
_RELATIVE = re.compile(r'(?<=from ")\./(?=[\w./-]+\.js";)')
_LARGE = 64 * 2**20
"""Bytes of a page that browsers open slowly."""


def write_page(runs: Sequence[Run], path: Path, effects: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write the page of one run, or of several to compare, with their records, and return a line about it. effects: of
    changes to the first run's episodes, as in the file of `verl-dag replay`. Raises UserError if it cannot be written.
    """
    page = page_of([parts_of(run, effects if run is runs[0] else ()) for run in runs])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [page])
    hint = "; --step and --uid make it smaller" if len(page) > _LARGE else ""
    return f"{path}: {counted(sum(len(run.records) for run in runs), 'episode')}, {len(page) / 1e6:.1f} MB{hint}"


def page_of(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the HTML of a page that has the parts of each run."""
    parts = ((f"{number}/{name}", part) for number, own in enumerate(runs) for name, part in own.items())
    data = "\n".join(_script(name, part) for name, part in parts)
    titles = (f"{own['index']['run']['workflow'] or 'run'} · {own['index']['run']['name']}" for own in runs)
    return _page(", ".join(titles), len(runs), data=data)


def live_page(folders: Sequence[Path]) -> bytes:
    """Return the HTML of a page that asks the server which it came from for the parts of each run."""
    return _page(", ".join(folder.name for folder in folders), len(folders), main=MAINS[1], source="'self'")


def _page(title: str, runs: int, *, data: str = "", main: str = MAINS[0], source: str = "'none'") -> bytes:
    """main: the module that starts the page. source: from where it may ask for data."""
    parts = {
        "title": html.escape(printable(title)),
        "runs": str(runs),
        "source": source,
        "main": main,
        "style": _read("vendor/uplot.css") + _read("style.css"),
        "uplot": _read("vendor/uplot.js"),
        "imports": json.dumps({"imports": _modules(main)}),
        "licences": "\n".join(_read(f"vendor/{name}.LICENSE.txt") for name in ("preact", "htm", "uplot")),
        "data": data,
    }
    text = re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], _read("page.html"))
    return text.encode()


def _read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _modules(main: str) -> dict[str, str]:
    """Return the import map: each module below its path in `web/`, in which relative imports have become such paths."""
    own = sorted(path.name for path in WEB.glob("*.js") if path.name == main or path.name not in MAINS)
    sources = {name: _RELATIVE.sub("", _read(name)) for name in own}
    sources |= {name: _read(file) for name, file in VENDORED.items()}
    return {name: _url("text/javascript", f"{text}\n//# sourceURL={name}\n") for name, text in sources.items()}


def _url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _script(name: str, data: Any) -> str:
    packed = base64.b64encode(gzip.compress(to_json(data), 6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'
