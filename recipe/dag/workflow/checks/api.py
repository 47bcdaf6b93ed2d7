"""Checks of API policies: the provider and the server's address, the name of the variable with its key, limits of the
budget, what the provider takes, and what a model that is never trained cannot have.

Invariant: no message repeats a text that may be a key.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.tools.address import address_problems
from recipe.dag.types.model import Api
from recipe.dag.types.provider import PROVIDERS
from recipe.dag.workflow.agent_schema import Policy, Sampling
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env

OWN_FIELDS = ("model", "messages", "prompt", "tools", "stream", "n", "system", "contents", "systemInstruction")
"""Fields of a request that `body` must not replace, each with its own key or none."""

_SAMPLING = frozenset(Sampling.model_fields) - {"temperature", "max_tokens", "thinking_tokens"}


def check_api(draft: Draft, policy: Policy, api: Api, path: KeyPath) -> Iterator[Problem]:
    """Check a policy with an `api`; `path` is the policy's."""
    problem = draft.source.problem
    for key, message in (
        ("model", "an API policy has no weights of its own; remove `model` or `api`"),
        ("lora", "an API policy has no weights of its own; remove `lora` or `api`"),
        ("gpus", "an API policy needs no GPU; remove it"),
        ("config", "verl does not run an API policy; remove it"),
    ):
        if key in policy.model_fields_set:
            yield problem((*path, key), message, key=True)
    if not policy.frozen:
        yield problem((*path, "frozen"), "an API policy is never trained; remove `frozen`", key=True)
    yield from _check_server(draft, api, (*path, "api"))
    yield from _check_agents(draft, str(path[-1]), api)
    yield from _check_algorithm(draft, (*path, "api"))


def provider_problem(api: Api) -> str | None:
    """Return `key: message` if an API, whose variables are resolved, does not say which provider it is or lacks what
    that needs; else None."""
    if api.service is None:
        if not api.model.strip():
            return "model: missing; this key is required"
        return (
            f"provider: the name `{api.model}` does not tell it; write one of {', '.join(PROVIDERS)}, or the "
            "`base_url` of a server with OpenAI's interface"
        )
    name = api.service.name
    if (api.script is not None) != (name == "mock"):
        if api.script is None:
            return "script: provider mock needs it; write file.py:function"
        return f"script: provider {name} has a server; remove this, or write `provider: mock`"
    if not api.model.strip() and name != "mock":
        return "model: missing; this key is required"
    return None


_OF_SERVERS = ("base_url", "key_env", "tokenizer", "body")
"""Options that a script does not read."""


def _check_server(draft: Draft, api: Api, here: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    for key in ("base_url", "model", "tokenizer", "cache"):
        text: str | None = getattr(api, key)
        if text is not None and key in api.model_fields_set and not text.strip():
            yield problem((*here, key), "must not be empty")
        elif text is not None and (message := check_env(text)):
            yield problem((*here, key), message)
    for key, message in address_problems((api.base_url or "").strip() or None, api.key_env):
        yield problem((*here, key), message)
    if api.max_model_len is not None and api.tokenizer is None:
        message = "only the token-id form counts tokens; add `tokenizer` or remove this"
        yield problem((*here, "max_model_len"), message, key=True)
    for key in sorted(api.body.keys() & set(OWN_FIELDS)):
        yield problem((*here, "body", key), "the engine sets this field; remove it", key=True)
    if not any(draft.reported(*here, key) for key in ("provider", "script", "base_url")):
        yield from _check_provider(draft, api, here)
    if not any(draft.reported(*here, key) for key in ("budget", "price")):
        yield from _check_budget(draft, api, here)


def _check_provider(draft: Draft, api: Api, here: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    if "${" in api.model and api.service is None:
        return  # the run sees the model's name
    if not api.model.strip() and "model" in api.model_fields_set:
        return  # reported above
    if complaint := provider_problem(api):
        key, _, message = complaint.partition(": ")
        yield problem((*here, key), message)
    if complaint or api.service is None:
        return
    if api.tokenizer is not None and not api.service.token_ids:
        message = f"provider {api.service.name} takes no token ids; remove it"
        yield problem((*here, "tokenizer"), message, key=True)
    if api.service.name == "mock":
        for key in (key for key in _OF_SERVERS if key in api.model_fields_set and key != "tokenizer"):
            yield problem((*here, key), "has no effect on a script; remove it", key=True)


def _check_budget(draft: Draft, api: Api, here: KeyPath) -> Iterator[Problem]:
    problem, limits = draft.source.problem, api.budget and api.budget.model_dump(exclude_none=True)
    if limits is None:
        if "on_budget" in api.model_fields_set:
            yield problem((*here, "on_budget"), "has no effect without `budget`; remove it", key=True)
    elif not limits:
        yield problem((*here, "budget"), "limits nothing; set `usd`, `calls` or `tokens`", key=True)
    elif "usd" in limits and api.price is None:
        yield problem(
            (*here, "budget", "usd"), "money is counted by `price: {input: ..., output: ...}`; add it", key=True
        )


def _check_agents(draft: Draft, name: str, api: Api) -> Iterator[Problem]:
    """Check that the provider takes what the policy's agents ask for."""
    service, problem = api.service, draft.source.problem
    if service is None:
        return
    for index, agent in draft.each_agent():
        if agent.policy != name:
            continue
        path: KeyPath = ("agents", index)
        if api.budget is not None and api.on_budget == "skip" and agent.on_failure != "skip":
            message = f"fails the calls of agent `{agent.name}`; write `on_failure: skip` there, or `on_budget: stop`"
            yield problem(("policies", name, "api", "on_budget"), message)
        for key in ("sampling", "validation"):
            options = getattr(agent, key)
            for option in sorted(options.model_fields_set & (_SAMPLING - service.sampling)):
                message = f"provider {service.name} (policy `{name}`) has no such option; remove it"
                yield problem((*path, key, option), message, key=True)
            if (most := service.max_temperature) is not None and (options.temperature or 0.0) > most:
                message = f"provider {service.name} (policy `{name}`) takes at most {most:g}"
                yield problem((*path, key, "temperature"), message)
        if agent.chat_template_kwargs and not service.template_options:
            message = f"provider {service.name} (policy `{name}`) has no chat template; remove it, or use `api.body`"
            yield problem((*path, "chat_template_kwargs"), message, key=True)


def _check_algorithm(draft: Draft, here: KeyPath) -> Iterator[Problem]:
    """Check that no policy is trained by an algorithm that reads the tokens of all agents."""
    algorithm = draft.algorithm
    if (algorithm.joint_critic or algorithm.team_value is not None) and any(
        not other.frozen for _, other in draft.each_policy()
    ):
        message = (
            f"estimator `{algorithm.estimator}` learns from the tokens of every agent, and an API policy has none that "
            "can be trained on; choose another estimator"
        )
        yield draft.source.problem(here, message, key=True)
