"""A language model as a workflow names it: weights of the run, or a server of someone else.

Invariant: a name and how to read it; nothing is loaded or looked up here, and a server's key is never part of it.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from recipe.dag.types.frozen import Frozen


class Model(Frozen):
    path: str
    """A local directory or hub name; `${oc.env:NAME}` is read when the run starts."""
    tokenizer_path: str | None = None
    trust_remote_code: bool = False


class Price(Frozen):
    """What a server charges, in any currency, per million tokens."""

    input: float = Field(ge=0.0)
    """Per million tokens of prompts."""
    output: float = Field(ge=0.0)
    """Per million generated tokens."""


class Api(Frozen):
    """A model behind a server with OpenAI's interface."""

    base_url: str
    """The URL before `/chat/completions`, such as `https://api.openai.com/v1`; `${oc.env:NAME}` is read when the run
    starts."""
    model: str = Field(min_length=1)
    """The name by which the server knows the model; `${oc.env:NAME}` is read when the run starts."""
    key_env: str | None = None
    """The environment variable that holds the key; without it, requests have none."""
    tokenizer: str | None = None
    """A tokenizer, as a local directory or hub name. With it, prompts are token ids, sent to `/completions`; without
    it, they are messages, sent to `/chat/completions`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """With `tokenizer`: tokens of prompt and response together; by default the tokenizer's `model_max_length`."""
    max_concurrent: int = Field(default=64, ge=1)
    """Maximum number of requests at the same time."""
    requests_per_minute: float | None = Field(default=None, gt=0.0)
    """Maximum rate of requests; by default unlimited."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Time limit of a request, in seconds; by default `episode.generation_timeout_s` or half of the call's remaining
    time."""
    retries: int = Field(default=5, ge=0)
    """Maximum number of times that a request is repeated after a lost connection, a time-out, or HTTP 408, 425, 429 or
    5xx."""
    max_wait_s: float = Field(default=30.0, gt=0.0)
    """Longest pause before a request is repeated, in seconds, even if the server asks for a longer one."""
    failures_to_open: int = Field(default=16, ge=1)
    """After this many failed requests in a row, none are sent for `probe_after_s`; then one request probes the
    server."""
    probe_after_s: float = Field(default=5.0, gt=0.0)
    """Seconds without requests after too many failures."""
    price: Price | None = None
    """Prices, from which the costs in metrics and results are computed."""
    body: dict[str, Any] = {}
    """Further fields of each request's body; null removes a field that would be sent (`{seed: null}`)."""
