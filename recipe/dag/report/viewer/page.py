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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.run_folder import Run
from recipe.dag.report.viewer.payload import Payload, payload_of

WEB = Path(__file__).parent / "web"
VENDORED = {
    "preact": "vendor/preact.js",
    "preact/hooks": "vendor/preact-hooks.js",
    "htm": "vendor/htm.js",
}
"""Bare import -> its file. uPlot is no module, and loaded as a script of the page."""
_RELATIVE = re.compile(r'(?<=from ")\./(?=[\w./-]+\.js";)')
_LARGE = 64 * 2**20
"""Bytes of a page that browsers open slowly."""


def write_page(
    run: Run, records: Sequence[Mapping[str, Any]], path: Path, effects: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Write the page and return a line about it. effects: of changes, as in the file of `verl-dag replay`. Raises
    UserError if it has no episode or cannot be written."""
    if not records:
        raise UserError(f"{run.folder}: no recorded episode matches")
    page = page_of(payload_of(run, records, effects))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [page])
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    hint = "; --step and --uid make it smaller" if len(page) > _LARGE else ""
    return f"{path}: {len(records)} episodes, {len(page) / 1e6:.1f} MB{hint}"


def page_of(payload: Payload) -> bytes:
    """Return the page's HTML."""
    title = printable(f"{payload.index['run']['workflow'] or 'run'} · {payload.index['run']['name']}")
    parts = {
        "title": html.escape(title),
        "style": _read("vendor/uplot.css") + _read("style.css"),
        "uplot": _read("vendor/uplot.js"),
        "imports": json.dumps({"imports": _modules()}),
        "licences": "\n".join(_read(f"vendor/{name}.LICENSE.txt") for name in ("preact", "htm", "uplot")),
        "data": "\n".join(_data(payload)),
    }
    text = re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], _read("page.html"))
    return text.encode()


def _read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _modules() -> dict[str, str]:
    """Return the import map: each module below its path in `web/`, in which relative imports have become such paths."""
    own = sorted(path.relative_to(WEB).as_posix() for path in WEB.glob("*.js"))
    sources = {name: _RELATIVE.sub("", _read(name)) for name in own}
    sources |= {name: _read(file) for name, file in VENDORED.items()}
    return {name: _url("text/javascript", f"{text}\n//# sourceURL={name}\n") for name, text in sources.items()}


def _url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _data(payload: Payload) -> Iterable[str]:
    yield _script("index", payload.index)
    yield _script("vocabularies", payload.vocabularies)
    yield _script("continuations", payload.continuations)
    for number, chunk in enumerate(payload.chunks):
        yield _script(f"chunk-{number}", chunk)


def _script(name: str, data: Mapping[str, Any] | Sequence[Any]) -> str:
    packed = base64.b64encode(gzip.compress(to_json(data), 6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'


def read_page(page: str) -> dict[str, Any]:
    """Return the data of a page by the name of its part."""
    parts = re.findall(r'<script type="application/gzip" id="([\w-]+)">([\w+/=]*)</script>', page)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in parts}
