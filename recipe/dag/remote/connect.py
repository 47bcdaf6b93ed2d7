"""From an API policy of a workflow to its endpoint.

Invariant: the key is read from the environment here and given to the transport alone; what travels to other processes
or into a file is the name of its variable.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.pace import part_of
from recipe.dag.endpoint.chat import end_of_turn_id
from recipe.dag.endpoint.client import Endpoint, PolicyEndpoint
from recipe.dag.remote.anthropic import AnthropicWire
from recipe.dag.remote.cache import Cache
from recipe.dag.remote.clients import ChatClient, CompletionsClient, Questions
from recipe.dag.remote.google import GoogleWire, vertex_url
from recipe.dag.remote.google_token import GoogleTokens
from recipe.dag.remote.ledger import Account, Ledger, left_of
from recipe.dag.remote.openai import OpenAIWire
from recipe.dag.remote.script import ScriptTransport
from recipe.dag.remote.transport import Transport
from recipe.dag.remote.wire import Wire
from recipe.dag.tools.address import key_from, url_problem
from recipe.dag.types.convention import SCRIPT
from recipe.dag.types.model import Api
from recipe.dag.types.provider import PROVIDERS
from recipe.dag.workflow.checks.api import provider_problem
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.schema import Workflow

NO_LIMIT = 1 << 30
"""A tokenizer's `model_max_length` above this means that it knows none."""
DEFAULT_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class ApiSpec:
    """The picklable description from which any process makes the policy's endpoint."""

    policy: str
    api: Api
    base: str = ""
    """The workflow file, from whose folder `script` is searched."""
    ledger: str | None = None
    """The file in which the run's processes count together; without it, a process counts on its own."""

    def share(self, index: int, count: int) -> ApiSpec:
        """Return the part of process `index` of `count`, which is at most `max_concurrent`; the parts together allow
        what the API's limits allow."""
        most, rate = part_of(self.api.max_concurrent, self.api.requests_per_minute, index, count)
        return replace(self, api=self.api.model_copy(update={"max_concurrent": most, "requests_per_minute": rate}))

    def endpoint(self, ledger: Ledger | None = None) -> Endpoint:
        """Raises UserError for a variable that is not set, a URL that is none, a script or a tokenizer that cannot be
        loaded, or a cache that is damaged."""
        api, where = self._resolved(), self._where
        ledger = ledger or Ledger(self.ledger)
        account = Account(self.policy, ledger, api.price, api.budget, stops=api.on_budget == "stop")
        cache = Cache(api.cache, f"{where}.cache") if api.cache is not None else None
        questions = Questions(api, self._transport(api, account), cache)
        if api.tokenizer is None:
            return ChatClient(api.model, questions)
        tokenizer = _tokenizer(api.tokenizer, where)
        limit = getattr(tokenizer, "model_max_length", NO_LIMIT)
        length = api.max_model_len or (int(limit) if limit < NO_LIMIT else DEFAULT_CONTEXT)
        try:
            end = end_of_turn_id(tokenizer)
        except UserError as error:
            raise UserError(f"{where}.tokenizer: {error}") from error
        client = CompletionsClient(questions, name=api.model, tokenizer=tokenizer, end_of_turn=end)
        return PolicyEndpoint(client, tokenizer, length)

    @property
    def _where(self) -> str:
        return f"policies.{self.policy}.api"

    def _resolved(self) -> Api:
        """Return the API with its provider and the values of its variables. Raises UserError."""
        names = ("model", "base_url", "tokenizer", "cache")
        written = {name: text for name in names if (text := getattr(self.api, name)) is not None}
        values = {name: resolve_env(text, f"{self._where}.{name}") for name, text in written.items()}
        api = self.api.model_copy(update=values)
        if problem := provider_problem(api):
            raise UserError(f"{self._where}.{problem}")
        assert api.service is not None  # provider_problem reports that
        return api.model_copy(update={"provider": api.service.name})

    def _transport(self, api: Api, account: Account) -> Transport:
        where = f"policy {self.policy}"
        if api.script is not None:
            function = SCRIPT.load(api.script, self.base, f"{self._where}.script")
            return ScriptTransport(function, api=api, where=where, account=account)
        service = PROVIDERS[api.provider or ""]
        url = api.base_url or vertex_url(resolve_env(service.base_url or "", f"{self._where}.base_url"))
        if message := url_problem(url):
            raise UserError(f"{self._where}.base_url: {message}")
        variable = _key_variable(api)
        key = key_from(variable, f"{self._where}.key_env")
        api = api.model_copy(update={"key_env": variable})
        # a token from the environment cannot be renewed
        tokens = GoogleTokens(where) if variable is None and api.base_url is None and service.credentials else None
        return Transport(api, url=url, key=key, where=where, wire=_wire(api), account=account, tokens=tokens)


def _wire(api: Api) -> Wire:
    if api.provider == "anthropic":
        return AnthropicWire()
    if api.provider in ("google", "vertex"):
        return GoogleWire(vertex=api.provider == "vertex")
    return OpenAIWire(official=api.base_url is None)


class Remotes:
    """The API policies of a run: their endpoints in this process, and what other processes make theirs from."""

    def __init__(self, workflow: Workflow, spent: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """`spent`: the totals of `counts` when the run was interrupted. Raises UserError."""
        apis = {name: policy.api for name, policy in workflow.policies.items() if policy.api is not None}
        self.specs = {name: ApiSpec(name, api, workflow.path) for name, api in apis.items()}
        self.ledger = Ledger()
        self.ledger.raise_to({name: counts for name, counts in (spent or {}).items() if name in self.specs})
        self.endpoints: Mapping[str, Endpoint] = {name: spec.endpoint(self.ledger) for name, spec in self.specs.items()}
        self._reported = self.ledger.totals()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def check(self) -> None:
        """Raise UserError unless every server answers and accepts its key, and every budget has something left."""
        for endpoint in self.endpoints.values():
            transport_of(endpoint).account.check(transport_of(endpoint).where)
        await asyncio.gather(*(transport_of(endpoint).check() for endpoint in self.endpoints.values()))

    def shared(self) -> dict[str, ApiSpec]:
        """Return the specs for processes that count together with this one."""
        if self._folder is None and self.specs:
            self._folder = tempfile.TemporaryDirectory(prefix="verl_dag_ledger_")
            self.ledger.share(Path(self._folder.name) / "ledger.sqlite")
        return {name: replace(spec, ledger=self.ledger.path) for name, spec in self.specs.items()}

    def counts(self) -> dict[str, dict[str, float]]:
        """Return what each policy has consumed since the run began, interruptions included."""
        return self.ledger.totals()

    def metrics(self) -> dict[str, float]:
        """Return what records do not hold: the calls that got no answer and the openings of the circuit breaker since
        the last time, and the share of the budget that is left."""
        counts, metrics = self.ledger.totals(), {}
        for name, spec in self.specs.items():
            now, earlier = self.ledger.counts(name), self._reported.get(name, {})
            for key, label in (("failed", "failed"), ("opened", "breaker")):
                metrics[f"policy/{name}/api/{label}"] = now[key] - earlier.get(key, 0.0)
            if spec.api.budget is not None:
                metrics[f"policy/{name}/api/budget_left"] = left_of(spec.api.budget, now)
        self._reported = counts
        return metrics

    async def close(self) -> None:
        for endpoint in self.endpoints.values():
            await transport_of(endpoint).close()
        self.ledger.close()
        if self._folder is not None:
            self._folder.cleanup()


def transport_of(endpoint: Endpoint) -> Transport:
    client = endpoint.client if isinstance(endpoint, PolicyEndpoint) else endpoint
    assert isinstance(client, CompletionsClient | ChatClient)  # ApiSpec makes no others
    return client.questions.transport


def _key_variable(api: Api) -> str | None:
    """Return the name of the variable with the key: the one that is written, or, for the provider's own server, the
    first of its variables that is set, unless it has credentials instead."""
    if api.key_env is not None or api.base_url is not None:
        return api.key_env
    service = PROVIDERS[api.provider or ""]
    if service.credentials and os.environ.get(service.credentials):
        return None
    variable = next((name for name in service.keys if os.environ.get(name)), None)
    return variable or (None if service.credentials else service.keys[0])


def _tokenizer(path: str, where: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"{where}.tokenizer: {path} cannot be loaded ({reason[0]})") from error
