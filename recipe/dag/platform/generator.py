"""Batched token generation on the CPU: token ids in, token ids and log-probs out.

Invariant: a request's tokens depend on its prompt, its sampling parameters and its seed, never on other requests in the
batch: randomness is counter-based (seed, position), not a shared stream. Parameters that cannot be sampled with end
their own request only. Log-probs are those of the sampled tokens after penalties and temperature and before top-k,
top-p and min-p, in nats, as SGLang reports them.

transformers' continuous batching has one random stream for all requests, so its samples depend on the other requests
and a resumed run could not repeat an interrupted one; on short requests it reached a quarter of this speed
(examples/bench_generator.py). Here the cache is one dense slab with a row per request, kept compact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Cache

from recipe.dag.platform.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its sampling parameters, and the response so far."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stopped: Callable[[list[int]], bool] | None = None
    """Returns True if a response contains a stop string."""
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    adapter: str | None = None
    """The version of an adapter that it computes with; None: the model alone."""
    handle: Any = None
    """Not read by the generator; the server stores its callback here."""
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str = ""
    failure: Exception | None = None
    """Why its next token cannot be sampled; the stop reason is then "error"."""


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages take memory when they are first written, which torch.zeros does at once: most requests
    are far shorter than the maximum. Raises MemoryError."""
    flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return flat.view(dtype).view(shape)


class SlabCache(Cache):
    """Keys and values of all requests: one row each, rows [0, active) in use."""

    def __init__(self, config: Any, rows: int, max_len: int, dtype: torch.dtype):
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, max_len, width)
        self.keys, self.values = _lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype)
        self.first = self.last = self.width = 0
        self.positions: torch.Tensor | None = None

    def view(self, first: int, last: int, positions: torch.Tensor, width: int) -> SlabCache:
        """Select rows [first, last) for the next forward, which writes at `positions` [rows, new] and reads the first
        `width` columns."""
        self.first, self.last, self.positions, self.width = first, last, positions, width
        return self

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        assert self.positions is not None  # `view` is called before every forward
        out = []
        for slab, new in ((self.keys, key_states), (self.values, value_states)):
            rows = slab[layer_idx, self.first : self.last]
            index = self.positions[:, None, :, None].expand(new.shape)
            rows.scatter_(2, index, new)
            out.append(rows[:, :, : self.width])
        return tuple(out)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of row `source` to row `target`."""
        for slab in (self.keys, self.values):
            slab[:, target, :, :length] = slab[:, source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # rows differ in length; every forward passes its positions and its mask


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each (seed, position), by the SplitMix64 finalizer. Shapes [B], dtype uint64."""
    with np.errstate(over="ignore"):
        x = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    # the upper 53 bits are as many as a float64 holds exactly
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, requests: list[Request]) -> tuple[list[int], list[float]]:
    """Sample one token for each row of `logits` [B, V]; return the tokens and their log-probs after temperature.

    Temperature 0 takes the most probable token, with its log-prob at temperature 1.
    """
    logits = logits.float()
    if any(r.repetition_penalty != 1.0 or r.presence_penalty or r.frequency_penalty for r in requests):
        logits = logits.clone()
        for row, request in zip(logits, requests, strict=True):
            # as in SGLang: presence and frequency count the response alone, repetition the prompt as well
            sampled, counts = torch.tensor(request.response_ids, dtype=torch.long).unique(return_counts=True)
            row[sampled] -= request.presence_penalty + request.frequency_penalty * counts
            seen = torch.tensor(sorted({*request.prompt_ids, *request.response_ids}))
            row[seen] = torch.where(
                row[seen] > 0, row[seen] / request.repetition_penalty, row[seen] * request.repetition_penalty
            )
    temperature = torch.tensor([r.temperature if r.temperature > 0 else 1.0 for r in requests])
    log_probs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    # float64: cumulative sums over a large vocabulary in float32 are too coarse to sample from
    probs = log_probs.double().exp()
    if any(r.top_k > 0 or r.top_p < 1.0 or r.min_p > 0 for r in requests):
        probs = truncate(probs, requests)
    cumulative = probs.cumsum(-1)
    seeds = np.array([r.seed for r in requests], dtype=np.uint64)
    positions = np.array([len(r.response_ids) for r in requests], dtype=np.uint64)
    # inverse CDF; scaling by the total makes renormalization after truncation unnecessary
    target = torch.from_numpy(uniform(seeds, positions))[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    greedy = torch.tensor([r.temperature == 0 for r in requests])
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens.tolist(), log_probs.gather(1, tokens[:, None])[:, 0].tolist()


def _sample_each(logits: torch.Tensor, requests: list[Request]) -> list[tuple[int, float] | Exception]:
    """Return the token and log-prob of each row, or why its parameters give none."""
    try:
        return list(zip(*sample(logits, requests), strict=True))
    except Exception as error:
        if len(requests) == 1:
            return [error]
        pairs = zip(logits.split(1), requests, strict=True)
        return [drawn for row, request in pairs for drawn in _sample_each(row, [request])]


def truncate(probs: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Set the tokens that top-k, top-p and min-p exclude to 0. `probs` [B, V] are not renormalized."""
    ordered, order = probs.sort(-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    top_k = torch.tensor([r.top_k if r.top_k > 0 else probs.shape[-1] for r in requests])
    top_p = torch.tensor([r.top_p for r in requests], dtype=probs.dtype)
    min_p = torch.tensor([r.min_p for r in requests], dtype=probs.dtype)
    # the mass before a token, so that the first token past top_p is kept, as in nucleus sampling
    keep = (rank < top_k[:, None]) & (ordered.cumsum(-1) - ordered < top_p[:, None])
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(probs).scatter(-1, order, ordered * keep)


class Generator:
    """A batch that requests join and leave between two forwards. Not thread-safe: one thread calls `add` and `step`."""

    def __init__(self, model: PreTrainedModel, *, max_requests: int, max_len: int):
        head = model.get_output_embeddings()
        assert head is not None  # AutoModelForCausalLM loads no model without one
        self.model, self._head = model.eval(), head
        self.max_len = max_len
        self.cache = SlabCache(model.config, max_requests, max_len, next(model.parameters()).dtype)
        self.max_requests = max_requests
        self.active: list[Request] = []
        self.adapters = ServedAdapters(model)

    @property
    def room(self) -> int:
        """The number of requests that can be added."""
        return self.max_requests - len(self.active)

    @torch.inference_mode()
    def add(self, requests: list[Request]) -> list[Request]:
        """Prefill `requests` (at most `room`) and sample their first tokens. Returns the finished ones."""
        self.adapters.select([request.adapter for request in requests])
        first = len(self.active)
        lengths = torch.tensor([len(r.prompt_ids) for r in requests])
        width = int(lengths.max())
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        positions = torch.arange(width).expand(len(requests), width)
        mask = torch.ones(width, width, dtype=torch.bool).tril()[None, None].expand(len(requests), 1, width, width)
        cache = self.cache.view(first, first + len(requests), positions, width)
        hidden = self._forward(ids, positions, mask, cache)
        self.active.extend(requests)
        return self._accept(hidden[torch.arange(len(requests)), lengths - 1], requests)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Sample one more token for every active request. Returns the finished ones."""
        requests = self.active
        self.adapters.select([request.adapter for request in requests])
        ids = torch.tensor([[r.response_ids[-1]] for r in requests])
        positions = torch.tensor([[len(r.prompt_ids) + len(r.response_ids) - 1] for r in requests])
        width = int(positions.max()) + 1
        mask = (torch.arange(width) <= positions)[:, None, None, :]
        hidden = self._forward(ids, positions, mask, self.cache.view(0, len(requests), positions, width))
        return self._accept(hidden[:, 0], requests)

    @torch.inference_mode()
    def score(self, ids: list[int], adapter: str | None) -> list[float]:
        """Return the log-probs [tokens - 1] of all tokens but the first at temperature 1, without the cache."""
        self.adapters.select([adapter])
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def _forward(self, ids, positions, mask, cache) -> torch.Tensor:
        out = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state

    def _accept(self, hidden: torch.Tensor, requests: list[Request]) -> list[Request]:
        for request, drawn in zip(requests, _sample_each(self._head(hidden), requests), strict=True):
            try:
                self._append(request, drawn)
            except Exception as error:
                request.stop_reason, request.failure = "error", error
        return self._remove([r for r in requests if r.stop_reason])

    def _append(self, request: Request, drawn: tuple[int, float] | Exception) -> None:
        if isinstance(drawn, Exception):
            raise drawn
        token, log_prob = drawn
        request.response_ids.append(token)
        request.log_probs.append(log_prob)
        if token in request.stop_token_ids or (request.stopped and request.stopped(request.response_ids)):
            request.stop_reason = "stop"
        elif len(request.response_ids) >= min(request.max_tokens, self.max_len - len(request.prompt_ids)):
            request.stop_reason = "length"

    def _remove(self, finished: list[Request]) -> list[Request]:
        """Fill each gap with the last row, so that the rows in use remain [0, active)."""
        for request in finished:
            row, last = self.active.index(request), len(self.active) - 1
            if row != last:
                moved = self.active[last]
                self.cache.move(last, row, len(moved.prompt_ids) + len(moved.response_ids))
                self.active[row] = moved
            self.active.pop()
        return finished

    def drop(self, request: Request) -> None:
        """Abort one active request."""
        request.stop_reason = "abort"
        self._remove([request])

    def drop_all(self) -> list[Request]:
        """Abort every active request."""
        dropped, self.active = self.active, []
        for request in dropped:
            request.stop_reason = "abort"
        return dropped
