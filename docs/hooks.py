"""MkDocs hooks: the site needs nothing but itself.

Invariant: links and pictures are relative and work on GitHub as they are. A file of the repository that a page links
to is a part of the site below repository/: a README as a page, a picture as it is, anything else as a page that shows
it. This holds for the links of those pages, too. Diagrams are drawn here, not by a script from elsewhere.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from diagrams import svg

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence) *$|(?<=\]\()(?P<link>[^)\s#]+)(?=[#)])",
    re.MULTILINE | re.DOTALL,
)
"""The target of a link, or a fenced block, in which nothing is a link."""
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}


def on_config(config: Any) -> None:
    fence = {"name": "mermaid", "class": "diagram", "format": lambda source, *_, **__: svg(source)}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def on_files(files: Files, *, config: Any) -> None:
    """Add what the pages link to, and what that links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        for target in _links(waiting.pop()):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
                if DOCS not in target.parents:
                    files.append(_file(target, config))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make the links of a page those of the site."""
    source = page.file.src_uri
    path = ROOT / source.removeprefix("repository/") if source.startswith("repository/") else DOCS / source

    def of_site(match: re.Match[str]) -> str:
        target = _target(path, match["link"])
        return posixpath.relpath(_uri(target), posixpath.dirname(source)) if target else match[0]

    return LINK.sub(of_site, markdown)


def _links(path: Path) -> list[Path]:
    """Return the files that a page links to."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in LANGUAGES)
    if path.suffix != ".md":
        return []
    return [target for match in LINK.finditer(path.read_text()) if (target := _target(path, match["link"]))]


def _target(page: Path, link: str | None) -> Path | None:
    """Return the file or folder of the repository that a link leads to; a folder's README stands for it."""
    target = Path(os.path.normpath(page.parent / (link or "")))
    if not link or ROOT not in target.parents or not target.exists():
        return None
    return target / "README.md" if (target / "README.md").exists() else target


def _uri(target: Path) -> str:
    """Return where the site has a file of the repository."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    path = f"repository/{target.relative_to(ROOT).as_posix()}"
    if target.is_dir():
        return f"{path}/index.md"
    return path if target.suffix in (".md", *PICTURES) else f"{path}.md"


def _file(target: Path, config: Any) -> File:
    if target.suffix in (".md", *PICTURES):
        return File.generated(config, _uri(target), abs_src_path=str(target))
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        body = "\n".join(f"- [{file.name}]({file.name})" for file in _links(target))
    else:
        body = f"~~~~~~{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text()}\n~~~~~~"
    return File.generated(config, _uri(target), content=f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n{body}\n")
