"""The services that a policy's API can be, and what each of them takes.

Invariant: facts only; how a request looks is in `remote`, one module for each wire format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ALL = frozenset(
    ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "ignore_eos")
)
_PROJECT = "${oc.env:VERTEX_PROJECT,${oc.env:GOOGLE_CLOUD_PROJECT}}"
_LOCATION = "${oc.env:VERTEX_LOCATION,${oc.env:GOOGLE_CLOUD_LOCATION}}"


@dataclass(frozen=True, slots=True)
class Provider:
    """A service with its own interface."""

    name: str
    base_url: str | None = None
    """Its own address, for policies that name none. It may contain `${oc.env:NAME}`."""
    keys: tuple[str, ...] = ()
    """Environment variables with the key, in order of preference, for policies that name neither one nor a URL."""
    credentials: str | None = None
    """The variable of a file of credentials, from which access tokens are made, unless there is a key."""
    models: str | None = None
    """The names of its models, as a regular expression that matches from the start."""
    sampling: frozenset[str] = _ALL
    """The sampling parameters that a request can carry, besides temperature and max_tokens."""
    max_temperature: float | None = None
    token_ids: bool = False
    """Prompts may be token ids (`tokenizer`)."""
    template_options: bool = False
    """Requests may carry options of the chat template."""


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider(
            "openai",
            base_url="https://api.openai.com/v1",
            keys=("OPENAI_API_KEY",),
            models=r"(chat)?gpt-|o[1-9](-|$)",
            token_ids=True,
            template_options=True,
        ),
        Provider(
            "anthropic",
            base_url="https://api.anthropic.com/v1",
            keys=("ANTHROPIC_API_KEY",),
            models="claude-",
            sampling=frozenset(("top_p", "top_k", "stop")),
            max_temperature=1.0,
        ),
        Provider(
            "google",
            base_url="https://generativelanguage.googleapis.com/v1beta",
            keys=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
            models="gemini-",
            sampling=frozenset(("top_p", "top_k", "presence_penalty", "frequency_penalty", "stop")),
            max_temperature=2.0,
        ),
        Provider(
            "vertex",
            # google.py replaces the host of the location `global`, which has none of its own
            base_url=f"https://{_LOCATION}-aiplatform.googleapis.com/v1/projects/{_PROJECT}/locations/{_LOCATION}",
            keys=("CLOUDSDK_AUTH_ACCESS_TOKEN", "GOOGLE_OAUTH_ACCESS_TOKEN"),
            credentials="GOOGLE_APPLICATION_CREDENTIALS",
            sampling=frozenset(("top_p", "top_k", "presence_penalty", "frequency_penalty", "stop")),
            max_temperature=2.0,
        ),
        Provider("mock"),
    )
}


def provider_of_model(model: str) -> str | None:
    """Return the name of the provider whose model this is; None if the name does not tell."""
    matches = (each for each in PROVIDERS.values() if each.models is not None and re.match(each.models, model))
    return next((provider.name for provider in matches), None)
