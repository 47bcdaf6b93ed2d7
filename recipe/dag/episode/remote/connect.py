"""From an API policy of a workflow to its endpoint.

Invariant: the key is read from the environment here and given to the transport alone; what travels to other processes
or into a file is the name of its variable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.dag.episode.chat import end_of_turn_id
from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.remote.clients import ChatEndpoint, CompletionsClient
from recipe.dag.episode.remote.transport import Transport
from recipe.dag.errors import UserError
from recipe.dag.types.model import Api
from recipe.dag.workflow.checks.api import url_problem
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.schema import Workflow

Endpoint = PolicyEndpoint | ChatEndpoint
NO_LIMIT = 1 << 30
"""A tokenizer's `model_max_length` above this means that it knows none."""
DEFAULT_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """The picklable description from which any process makes the policy's endpoint."""

    policy: str
    api: Api

    def share(self, index: int, count: int) -> ApiSpec:
        """Return the part of process `index` of `count`, which is at most `max_concurrent`; the parts together allow
        what the API's limits allow."""
        whole, rate = self.api.max_concurrent, self.api.requests_per_minute
        limits = {
            "max_concurrent": whole // count + (index < whole % count),
            "requests_per_minute": rate and rate / count,
        }
        return ApiSpec(self.policy, self.api.model_copy(update=limits))

    def endpoint(self) -> Endpoint:
        """Raises UserError for a variable that is not set, a URL that is none, or a tokenizer that cannot be loaded."""
        api, where = self.api, f"policies.{self.policy}.api"
        url = resolve_env(api.base_url, f"{where}.base_url").rstrip("/")
        if message := url_problem(url):
            raise UserError(f"{where}.base_url: {message}")
        name = resolve_env(api.model, f"{where}.model")
        api = api.model_copy(update={"model": name})
        transport = Transport(api, url=url, key=_key(api, where), where=f"policy {self.policy}")
        if api.tokenizer is None:
            return ChatEndpoint(api, name, transport)
        tokenizer = _tokenizer(resolve_env(api.tokenizer, f"{where}.tokenizer"), where)
        limit = getattr(tokenizer, "model_max_length", NO_LIMIT)
        length = api.max_model_len or (int(limit) if limit < NO_LIMIT else DEFAULT_CONTEXT)
        try:
            end = end_of_turn_id(tokenizer)
        except UserError as error:
            raise UserError(f"{where}.tokenizer: {error}") from error
        client = CompletionsClient(api, name=name, transport=transport, tokenizer=tokenizer, end_of_turn=end)
        return PolicyEndpoint(client, tokenizer, length)


class Remotes:
    """The API policies of a run: their endpoints in this process, and what other processes make theirs from."""

    def __init__(self, workflow: Workflow) -> None:
        """Raises UserError."""
        apis = {name: policy.api for name, policy in workflow.policies.items() if policy.api is not None}
        self.specs = {name: ApiSpec(name, api) for name, api in apis.items()}
        self.endpoints: Mapping[str, Endpoint] = {name: spec.endpoint() for name, spec in self.specs.items()}

    async def check(self) -> None:
        """Raise UserError unless every server answers and accepts its key."""
        await asyncio.gather(*(transport_of(endpoint).check() for endpoint in self.endpoints.values()))

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await transport_of(endpoint).close()


def transport_of(endpoint: Endpoint) -> Transport:
    if isinstance(endpoint, ChatEndpoint):
        return endpoint.transport
    assert isinstance(endpoint.client, CompletionsClient)  # the only client that ApiSpec makes
    return endpoint.client.transport


def _key(api: Api, where: str) -> str | None:
    if api.key_env is None:
        return None
    key = os.environ.get(api.key_env, "").strip()
    if not key:
        # only what looks like a variable is quoted, in case that somebody wrote the key itself
        name = api.key_env if api.key_env.isupper() else "named there"
        raise UserError(f"{where}.key_env: environment variable {name} is not set; export it with the server's key")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{where}.key_env: the key in {api.key_env} has characters that no HTTP header can hold")
    return key


def _tokenizer(path: str, where: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"{where}.tokenizer: {path} cannot be loaded ({reason[0]})") from error
