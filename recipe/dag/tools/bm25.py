"""A BM25 index of passages: what a search without a server ranks by.

Invariant: the ranking is a function of the passages and the query: equal scores keep the order of the passages. The
index on disk is a cache by content: it is rebuilt if it is missing or unreadable, and holds numbers and words alone.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), with Lucene's idf.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import bm25s
import numpy as np

from recipe.dag.tools.passages import Passage

logger = logging.getLogger(__name__)
logging.getLogger(bm25s.__name__).setLevel(logging.WARNING)  # importing it sets DEBUG

K1, B = 1.2, 0.75
VERSION = 1
"""Of words: a new one makes older caches unused."""
CACHED_FROM = 2000
"""Passages from which an index is worth a file: fewer are indexed in a fraction of a second."""
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
"""Scripts without spaces count by character."""


def words(text: str) -> list[str]:
    """Return the words of a text in a form in which they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@dataclass(frozen=True, slots=True)
class Index:
    """Ranks passages by Lucene's variant of BM25."""

    ranker: bm25s.BM25

    @classmethod
    def build(cls, passages: Iterable[Passage]) -> Index:
        """Return the index of `passages`; titles count as text."""
        vocabulary = {"": 0}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{passage.title}\n{passage.text}")]
            for passage in passages
        ]
        ranker = bm25s.BM25(k1=K1, b=B, dtype="float64")
        # without any word, a passage of the empty one: bm25s would divide by the mean length
        ranker.index((ids if len(vocabulary) > 1 else [[0]], vocabulary), show_progress=False)
        return cls(ranker)

    def search(self, query: str, top_k: int) -> list[int]:
        """Return the numbers of the best passages that share a word with the query, best first."""
        known = self.ranker.get_tokens_ids(sorted(set(words(query))))  # sorted: the sum depends on the order
        scores = self.ranker.get_scores_from_ids(known)
        hits = np.flatnonzero(scores)
        order = np.argsort(-scores[hits], kind="stable")  # `retrieve` does not keep the order of equal scores
        return [int(number) for number in hits[order][:top_k]]


def open_index(passages: Sequence[Passage], digest: str, *, cache: Path | None = None) -> Index:
    """Return the index of `passages`, read from the cache if it is there. `digest`: identifies the passages. `cache`: a
    folder other than the user's."""
    if len(passages) < CACHED_FROM:
        return Index.build(passages)
    versions = f"{VERSION} {bm25s.__version__} {unicodedata.unidata_version}"
    folder = (cache or cache_folder()) / hashlib.sha256(f"{versions} {digest}".encode()).hexdigest()[:32]
    with suppress(OSError, ValueError, KeyError, TypeError, EOFError):
        ranker = bm25s.BM25.load(folder)
        sizes = ranker.scores["num_docs"], len(ranker.scores["indptr"])
        if sizes == (len(passages), len(ranker.vocab_dict) + 1):
            return Index(ranker)
    index = Index.build(passages)
    try:
        _save(index, folder)
    except OSError as error:
        logger.info("the search index is not cached in %s: %s", folder.parent, error)
    return index


def cache_folder() -> Path:
    """Return the folder of cached indices: `verl-dag/search` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "verl-dag" / "search"


def _save(index: Index, folder: Path) -> None:
    """Write the folder at once, so that a process that starts meanwhile reads all of it or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial_", ignore_cleanup_errors=True) as partial:
        index.ranker.save(partial, show_progress=False)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


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
