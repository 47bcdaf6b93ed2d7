"""Encodes and decodes text without the per-token work of transformers, and encodes off the event loop.

Invariant: the results equal those of the tokenizer's own `encode` and `decode`. Texts that wait at the same time are
encoded as one batch, because a thread that takes the GIL once per text slows the event loop down.
"""

from __future__ import annotations

import asyncio
import copy
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.core.per_loop import PerLoop

SHORT = 512
"""Up to this many characters, encoding takes less time than passing the text to another thread."""


@dataclass(slots=True)
class _Queue:
    """The texts that wait on one event loop."""

    waiting: list[tuple[str, asyncio.Future[list[int]]]] = field(default_factory=list)
    busy: bool = False


class TextCodec:
    """Encodes and decodes for any number of coroutines and event loops."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0
        self._queues = PerLoop(_Queue)
        self.direct = _keeps(tokenizer, "__call__", "encode", "_encode_plus")
        """True if the tokenizer's Rust backend encodes in another thread; other tokenizers encode in the caller's."""
        self._decode = tokenizer._decode if _keeps(tokenizer, "decode") else tokenizer.decode

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text` without special tokens around it."""
        if not self.direct or len(text) <= SHORT:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        loop, queue = asyncio.get_running_loop(), self._queues.get()
        future: asyncio.Future[list[int]] = loop.create_future()
        queue.waiting.append((text, future))
        if not queue.busy:
            queue.busy = True
            loop.call_soon(self._start, loop, queue)  # deferred, so that texts of the same iteration join the batch
        return await future

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`, which must be a list of Python integers: they are not checked."""
        return self._decode(ids, skip_special_tokens=skip_special_tokens)

    def _start(self, loop: asyncio.AbstractEventLoop, queue: _Queue) -> None:
        batch = [entry for entry in queue.waiting if not entry[1].done()]
        queue.waiting = []
        if not batch:
            queue.busy = False
            return
        self._executor().submit(self._work, loop, queue, batch)

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None or self._process != os.getpid():  # a forked child does not have its parent's threads
            self._process = os.getpid()
            self._threads = ThreadPoolExecutor(1, "episode-encoding")
        return self._threads

    def _work(self, loop: asyncio.AbstractEventLoop, queue: _Queue, batch: list[tuple[str, asyncio.Future]]) -> None:
        if self._backend is None:
            self._backend = _own_backend(self._tokenizer)
        try:
            encodings = self._backend.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            results: list[Any] = [encoding.ids for encoding in encodings]
        except Exception:  # a text that cannot be encoded must fail its own call only
            results = [self._encode_one(text) for text, _ in batch]
        try:
            loop.call_soon_threadsafe(self._settle, loop, queue, batch, results)
        except RuntimeError:
            return  # the loop has closed: nothing is waiting any more

    def _encode_one(self, text: str) -> list[int] | Exception:
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:
            return error

    def _settle(self, loop: asyncio.AbstractEventLoop, queue: _Queue, batch: list, results: list) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._start(loop, queue)


def _keeps(tokenizer: Any, *methods: str) -> bool:
    """Return whether this is a Rust tokenizer of transformers whose class does not override `methods`."""
    base = next((kind for kind in type(tokenizer).__mro__ if kind.__name__ == "TokenizersBackend"), None)
    if base is None or not hasattr(tokenizer.backend_tokenizer, "encode_batch_fast"):
        return False
    return all(getattr(type(tokenizer), name) is getattr(base, name) for name in methods)


def _own_backend(tokenizer: Any) -> Any:
    """Return a private copy of the backend: hooks on the loop's thread may change how the tokenizer truncates or pads,
    which Rust refuses while another thread encodes."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
