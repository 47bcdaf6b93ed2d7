"""The texts of a folder, cut into passages for a search index.

Invariant: the passages are a function of the files' names and contents alone. No file outside the folder is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe.dag.core.errors import UserError

SUFFIXES = (".txt", ".md", ".jsonl")
MAX_FILES = 20_000
_BLANK = re.compile(r"\n[ \t]*\n\s*")
_HEADING = re.compile(r"#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*")
_QUOTED_TITLE = re.compile(r'"([^"\n]+)"\n')
"""The first line of a document of wiki-18, the collection of Search-R1."""
_BREAK = re.compile(r"(?<=[.!?])\s+|\s+")


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Collection:
    """The files of a folder: name relative to it, with slashes -> content."""

    folder: Path
    files: dict[str, bytes]

    @property
    def digest(self) -> str:
        """Return a hash of names and contents."""
        total = hashlib.sha256()
        for name, content in self.files.items():
            total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
        return total.hexdigest()

    def passages(self, limit: int) -> list[Passage]:
        """Return the passages, each of at most `limit` characters, in the order of the files. Raises UserError for a
        file that cannot be read."""
        passages: list[Passage] = []
        for name, content in self.files.items():
            try:
                text = content.decode("utf-8-sig").replace("\r\n", "\n")
            except UnicodeDecodeError:
                raise UserError(
                    f"{self.folder / name}: is not UTF-8; convert it, or move it out of the folder"
                ) from None
            documents = self._documents(name, text)
            passages += [Passage(title, piece) for title, body in documents for piece in pieces(body, limit)]
        return passages

    def _documents(self, name: str, text: str) -> Iterator[tuple[str, str]]:
        """Yield (title, text) of each document of a file."""
        if name.endswith(".jsonl"):
            yield from self._rows(name, text)
        elif name.endswith(".md"):
            yield from _sections(name, text)
        else:
            yield name, text

    def _rows(self, name: str, text: str) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            body = row.get("contents", row.get("text")) if isinstance(row, dict) else None
            if not isinstance(row, dict) or not isinstance(body, str):
                raise UserError(f"{self.folder / name}:{number}: must be an object with `contents` or `text`")
            quoted = _QUOTED_TITLE.match(body)
            title = row.get("title") or (quoted[1] if quoted else "")
            yield str(title or f"{name}:{number}"), body[quoted.end() :] if quoted else body


def read_collection(folder: Path, *, max_mb: float) -> Collection:
    """Return the files of a folder, in the order of their names. Hidden files and other formats are left out.

    Raises UserError if there are none, if they are too large, and for a link that leads out of the folder."""
    root = folder.resolve()
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(_files(root, root), key=lambda path: path.relative_to(root).as_posix()):
        size += path.stat().st_size
        if size > max_mb * 1e6 or len(files) == MAX_FILES:
            limit = f"{MAX_FILES:,} files" if len(files) == MAX_FILES else f"{max_mb:g} MB (max_mb)"
            raise UserError(f"{root}: holds more than {limit}; a search service (`url`) is made for that")
        files[path.relative_to(root).as_posix()] = path.read_bytes()
    if not files:
        raise UserError(f"{root}: holds no {', '.join(SUFFIXES)} file")
    return Collection(root, files)


def _files(folder: Path, root: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_symlink() and not path.resolve().is_relative_to(root):
            raise UserError(f"{path}: is a link out of the folder {root}; copy what it names")
        if entry.is_dir(follow_symlinks=False):
            yield from _files(path, root)
        elif entry.name.endswith(SUFFIXES) and entry.is_file():
            yield path


def _sections(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each part of a Markdown file, titled by the heading above it."""
    title, lines, fenced = name, [], False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else _HEADING.fullmatch(line)
        if heading is not None:
            yield title, "\n".join(lines)
            title, lines = f"{name}: {heading[1]}", []
        else:
            lines.append(line)
    yield title, "\n".join(lines)


def pieces(text: str, limit: int) -> Iterator[str]:
    """Yield the text in pieces of whole paragraphs, as many as fit into `limit` characters; a longer paragraph is cut
    after a sentence, or else a word."""
    piece = ""
    for paragraph in _BLANK.split(text.strip()):
        for part in _cut(paragraph.strip(), limit):
            if piece and len(piece) + 2 + len(part) > limit:
                yield piece
                piece = ""
            piece = f"{piece}\n\n{part}" if piece else part
    if piece:
        yield piece


def _cut(paragraph: str, limit: int) -> Iterator[str]:
    while len(paragraph) > limit:
        breaks = [match for match in _BREAK.finditer(paragraph, 0, limit + 1) if match.start() > 0]
        sentences = [match for match in breaks if paragraph[match.start() - 1] in ".!?"]
        # a sentence that ends early would leave a tiny piece
        best = next((match for match in reversed(sentences) if match.start() > limit // 3), None)
        best = best or (breaks[-1] if breaks else None)
        end, start = (best.start(), best.end()) if best is not None else (limit, limit)
        yield paragraph[:end]
        paragraph = paragraph[start:]
    if paragraph:
        yield paragraph
