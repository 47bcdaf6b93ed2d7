"""Checks of API policies: the server's address, the name of the variable with its key, and what a model that is never
trained cannot have.

Invariant: no message repeats a text that may be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recipe.dag.types.model import Api
from recipe.dag.workflow.draft import Draft
from recipe.dag.workflow.interpolation import check_env
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.schema import Policy

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")
OWN_FIELDS = ("model", "messages", "prompt", "tools", "stream", "n")
"""Fields of a request that `body` must not replace, each with a key of its own or none."""


def url_problem(url: str) -> str | None:
    """Return the error message for a `base_url`, or None."""
    if "@" in url or "?" in url:
        return "must hold neither a name, a password nor parameters; name the variable with the key in `key_env`"
    if not _URL.fullmatch(url):
        return "expected a URL such as http://localhost:8000/v1 or https://api.openai.com/v1"
    return None


def variable_problem(name: str) -> str | None:
    """Return the error message for the name of an environment variable, or None. It does not repeat the name."""
    return None if _VARIABLE.fullmatch(name) else "expected the name of an environment variable, not the key itself"


def check_api(draft: Draft, policy: Policy, api: Api, path: KeyPath) -> Iterator[Problem]:
    """Check a policy with an `api`; `path` is the policy's."""
    problem = draft.source.problem
    for key, message in (
        ("model", "an API policy has no weights of its own; remove `model` or `api`"),
        ("gpus", "an API policy needs no GPU; remove it"),
        ("config", "verl does not run an API policy; remove it"),
    ):
        if key in policy.model_fields_set:
            yield problem((*path, key), message, key=True)
    if not policy.frozen:
        yield problem((*path, "frozen"), "an API policy is never trained; remove `frozen`", key=True)
    yield from _check_server(draft, api, (*path, "api"))
    yield from _check_algorithm(draft, (*path, "api"))


def _check_server(draft: Draft, api: Api, here: KeyPath) -> Iterator[Problem]:
    problem = draft.source.problem
    for key in ("base_url", "model", "tokenizer"):
        text: str | None = getattr(api, key)
        if text is not None and not text.strip():
            yield problem((*here, key), "must not be empty")
        elif text is not None and (message := check_env(text)):
            yield problem((*here, key), message)
    if "${" not in api.base_url and api.base_url.strip() and (message := url_problem(api.base_url)):
        yield problem((*here, "base_url"), message)
    if api.key_env is not None and (message := variable_problem(api.key_env)):
        yield problem((*here, "key_env"), message)
    if api.max_model_len is not None and api.tokenizer is None:
        message = "only the token-id form counts tokens; add `tokenizer` or remove this"
        yield problem((*here, "max_model_len"), message, key=True)
    for key in sorted(api.body.keys() & set(OWN_FIELDS)):
        yield problem((*here, "body", key), "the engine sets this field; remove it", key=True)


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
