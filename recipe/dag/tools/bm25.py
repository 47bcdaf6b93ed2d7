"""A BM25 index of passages: what a search without a server ranks by.

Invariant: the ranking is a function of the passages and the query: equal scores keep the order of the passages. The
index on disk is a cache by content: it is rebuilt if it is missing or unreadable, and holds numbers and words alone.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), with Lucene's idf.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import tempfile
import unicodedata
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recipe.dag.tools.passages import Passage

logger = logging.getLogger(__name__)

K1, B = 1.2, 0.75
VERSION = 1
"""Of words and files: a new one makes older caches unused."""
CACHED_FROM = 2000
"""Passages from which an index is worth a file: fewer are indexed in a fraction of a second."""
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
"""Scripts without spaces count by character."""


def words(text: str) -> list[str]:
    """Return the words of a text in a form in which they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@dataclass(slots=True)
class Index:
    """Postings of each word, one word after the other: `docs` and `counts`, from `starts[k]` to `starts[k + 1]`."""

    vocabulary: dict[str, int]
    starts: np.ndarray
    docs: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray
    """Words per passage."""
    norms: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        mean = self.lengths.mean() if len(self.lengths) else 1.0
        self.norms = K1 * (1.0 - B + B * self.lengths / max(mean, 1.0))

    @classmethod
    def build(cls, passages: Iterable[Passage]) -> Index:
        """Return the index of `passages`; titles count as text."""
        vocabulary: dict[str, int] = {}
        terms, docs, counts, lengths = array("q"), array("q"), array("q"), array("q")
        for number, passage in enumerate(passages):
            tally = Counter(words(f"{passage.title}\n{passage.text}"))
            lengths.append(tally.total())
            for word, count in tally.items():
                terms.append(vocabulary.setdefault(word, len(vocabulary)))
                docs.append(number)
                counts.append(count)
        by_term = np.asarray(terms, dtype=np.int64)
        order = np.argsort(by_term, kind="stable")
        sizes = np.bincount(by_term, minlength=len(vocabulary))
        return cls(
            vocabulary,
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.asarray(docs, dtype=np.int32)[order],
            np.asarray(counts, dtype=np.int32)[order],
            np.asarray(lengths, dtype=np.int32),
        )

    def search(self, query: str, top_k: int) -> list[int]:
        """Return the numbers of the best passages that share a word with the query, best first."""
        scores = np.zeros(len(self.lengths))
        for word in sorted(set(words(query))):  # sorted: the sum must not depend on the order of the query
            term = self.vocabulary.get(word)
            if term is None:
                continue
            part = slice(self.starts[term], self.starts[term + 1])
            docs, counts = self.docs[part], self.counts[part]
            idf = math.log(1.0 + (len(self.lengths) - len(docs) + 0.5) / (len(docs) + 0.5))
            scores[docs] += idf * counts * (K1 + 1.0) / (counts + self.norms[docs])
        hits = np.flatnonzero(scores)
        order = np.argsort(-scores[hits], kind="stable")
        return [int(number) for number in hits[order][:top_k]]


def open_index(passages: Sequence[Passage], digest: str, *, cache: Path | None = None) -> Index:
    """Return the index of `passages`, read from the cache if it is there. `digest`: identifies the passages. `cache`: a
    folder other than the user's."""
    if len(passages) < CACHED_FROM:
        return Index.build(passages)
    name = hashlib.sha256(f"{VERSION} {unicodedata.unidata_version} {digest}".encode()).hexdigest()[:32]
    file = (cache or cache_folder()) / f"{name}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        index = _load(file)
        if len(index.lengths) == len(passages):
            return index
    index = Index.build(passages)
    try:
        _save(index, file)
    except OSError as error:
        logger.info("the search index is not cached in %s: %s", file.parent, error)
    return index


def cache_folder() -> Path:
    """Return the folder of cached indices: `verl-dag/search` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "verl-dag" / "search"


def _load(file: Path) -> Index:
    with np.load(file, allow_pickle=False) as data:
        vocabulary = data["words"].tobytes().decode().split("\n")
        arrays = (data[name] for name in ("starts", "docs", "counts", "lengths"))
        return Index({word: number for number, word in enumerate(vocabulary)}, *arrays)


def _save(index: Index, file: Path) -> None:
    """Write the file at once, so that a process that starts meanwhile reads all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    listed = np.frombuffer("\n".join(index.vocabulary).encode(), dtype=np.uint8)
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=".partial_")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(
                stream,
                words=listed,
                starts=index.starts,
                docs=index.docs,
                counts=index.counts,
                lengths=index.lengths,
            )
        os.replace(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def snippet(text: str, query: str, limit: int) -> str:
    """Return the part of a text, of at most `limit` characters, that has the most words of the query."""
    if len(text) <= limit:
        return text
    wanted = set(words(query))
    spots = [(match.start(), word) for match in re.finditer(r"\S+", text) for word in words(match[0]) if word in wanted]
    best, most = 0, 0
    for start, _ in spots:
        # half of the room before the first match would hide what follows it
        begin = max(0, start - limit // 4)
        inside = len({word for spot, word in spots if begin <= spot < begin + limit})
        if inside > most:
            best, most = begin, inside
    begin = text.rfind(" ", 0, best) + 1 if best else 0
    room = limit - 3 * (begin > 0) - 3
    part = text[begin : begin + room]
    if begin + room < len(text):
        part = part[: part.rfind(" ")] if " " in part else part
        part += "..."
    return f"...{part}" if begin else part
