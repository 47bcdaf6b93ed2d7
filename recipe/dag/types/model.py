"""A language model as a workflow names it: weights of the run, or a server of someone else.

Invariant: a name and how to read it; nothing is loaded or looked up here, and a server's key is never part of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from recipe.dag.core.frozen import Frozen, Mark
from recipe.dag.types.provider import PROVIDERS, Provider, provider_of_model


class Model(Frozen):
    path: Annotated[str, Mark.CONTENT]
    """A local directory or hub name; `${oc.env:NAME}` is read when the run starts."""
    tokenizer_path: Annotated[str | None, Mark.CONTENT] = None
    trust_remote_code: bool = False


class Price(Frozen):
    """A server's prices, in any currency, per million tokens."""

    input: float = Field(ge=0.0)
    """Per million tokens of prompts."""
    output: float = Field(ge=0.0)
    """Per million generated tokens."""

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of an answer."""
        return (prompt_tokens * self.input + completion_tokens * self.output) / 1e6


class Budget(Frozen):
    """The limits of a run's spending on an API, resumptions included."""

    usd: float | None = Field(default=None, gt=0.0)
    """Money, in the currency of `price`."""
    calls: int | None = Field(default=None, ge=1)
    """Requests, repeated ones included."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers together."""


class Api(Frozen):
    """A model behind a server, or a Python function in its place."""

    provider: Literal["openai", "anthropic", "google", "vertex", "mock"] | None = None
    """The interface of the server. By default that of `script` (mock) or `base_url` (openai, which most servers speak),
    and without these the one that the model's name tells: gpt-, o1-, o3- (openai), claude- (anthropic), gemini-
    (google)."""
    base_url: str | None = None
    """The URL before `/chat/completions`, such as `http://localhost:8000/v1` (anthropic: before `/messages`; google:
    before `/models`; vertex: before `/publishers`); by default the provider's own. `${oc.env:NAME}` is read when the
    run starts."""
    model: str = ""
    """The name by which the server knows the model; `${oc.env:NAME}` is read when the run starts."""
    script: Annotated[str | None, Mark.CODE] = None
    """Provider mock only: `file.py:function`, called in this process with the messages; it returns the answer's text,
    or a message in OpenAI's form. What it raises is handled as a server's failure."""
    key_env: Annotated[str | None, Mark.UNLEARNED] = None
    """The environment variable that holds the key (vertex: an access token). By default the provider's own, such as
    ANTHROPIC_API_KEY; with a `base_url`, requests have no key."""
    tokenizer: str | None = None
    """A tokenizer, as a local directory or hub name. With it, prompts are token ids, sent to `/completions`; without
    it, they are messages, sent to `/chat/completions`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """With `tokenizer`: tokens of prompt and response together; by default the tokenizer's `model_max_length`."""
    max_concurrent: Annotated[int, Mark.UNLEARNED] = Field(default=64, ge=1)
    """Maximum number of requests at the same time."""
    requests_per_minute: Annotated[float | None, Mark.UNLEARNED] = Field(default=None, gt=0.0)
    """Maximum rate of requests; by default unlimited."""
    timeout_s: Annotated[float | None, Mark.UNLEARNED] = Field(default=None, gt=0.0)
    """Time limit of a request, in seconds; by default `episode.generation_timeout_s` or half of the call's remaining
    time."""
    retries: Annotated[int, Mark.UNLEARNED] = Field(default=5, ge=0)
    """Maximum number of times that a request is repeated after a lost connection, a time-out, or HTTP 408, 425, 429 or
    5xx."""
    max_wait_s: Annotated[float, Mark.UNLEARNED] = Field(default=30.0, gt=0.0)
    """Longest pause before a request is repeated, in seconds, even if the server asks for a longer one."""
    failures_to_open: Annotated[int, Mark.UNLEARNED] = Field(default=16, ge=1)
    """After this many failed requests in a row, none are sent for `probe_after_s`; then one request probes the
    server."""
    probe_after_s: Annotated[float, Mark.UNLEARNED] = Field(default=5.0, gt=0.0)
    """Seconds without requests after too many failures."""
    price: Annotated[Price | None, Mark.UNLEARNED] = None
    """Prices, from which the costs in metrics and results are computed."""
    budget: Annotated[Budget | None, Mark.UNLEARNED] = None
    """Limits over the whole run, which its processes share and its checkpoints keep."""
    on_budget: Annotated[Literal["stop", "skip"], Mark.UNLEARNED] = "stop"
    """What happens when the budget is spent. stop: the run ends with a checkpoint, and goes on with a larger budget.
    skip: further calls of the policy fail."""
    cache: Annotated[str | None, Mark.UNLEARNED] = None
    """A SQLite file with answers; the same request to the same server is answered from it. At temperatures above 0 it
    is the same request only with the same seed. `${oc.env:NAME}` is read when the run starts."""
    body: dict[str, Any] = {}
    """Further fields of each request's body; null removes a field that would be sent (`{seed: null}`)."""

    @property
    def service(self) -> Provider | None:
        """The provider; None if nothing tells it, or if an environment variable does."""
        name = self.provider or ("mock" if self.script is not None else None)
        name = name or ("openai" if self.base_url is not None else provider_of_model(self.model))
        return PROVIDERS[name] if name is not None else None

    @property
    def title(self) -> str:
        """The model and where it is, for a reader."""
        if self.script is not None:
            return self.script
        return f"{self.model} at {self.base_url or (self.service.name if self.service else 'its provider')}"
