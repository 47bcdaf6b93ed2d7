"""Where a service is, the key that it wants, and how it is asked.

Invariant: no message repeats a text that may be a key. Importing this needs no HTTP client, since `validate` reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from recipe.dag.core.errors import UserError
from recipe.dag.core.frozen import Frozen, Mark

KEYS = set[str]()
"""The keys that this process has read, for whatever removes secrets from its records."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")


class ServiceOptions(Frozen):
    """The options of a tool that say how its service is asked, not what it answers."""

    key_env: Annotated[str | None, Mark.UNLEARNED] = None
    """The environment variable with the key; without it, requests have none."""
    key_header: Annotated[str, Mark.UNLEARNED] = Field(default="Authorization", pattern=r"^[A-Za-z][A-Za-z0-9-]*$")
    """The header that holds the key; in `Authorization`, the word Bearer comes before it."""
    request_timeout_s: Annotated[float, Mark.UNLEARNED] = Field(default=20.0, gt=0.0)
    """Seconds for each request."""
    retries: Annotated[int, Mark.UNLEARNED] = Field(default=3, ge=0)
    """Requests after the first, if the service cannot be reached or is overloaded."""


HOW_ASKED = tuple(ServiceOptions.model_fields)


def address_problems(url: str | None, key_env: str | None, option: str = "base_url") -> Iterator[tuple[str, str]]:
    """Yield (option, message) for what is wrong with a service's URL, which may name variables, and with `key_env`.
    `option`: the name of the URL."""
    if url is not None and "${" not in url and (message := url_problem(url)):
        yield option, message
    if key_env is not None and not _VARIABLE.fullmatch(key_env):
        yield "key_env", "expected the name of an environment variable, not the key itself"


def url_problem(url: str) -> str | None:
    """Return what is wrong with the URL of a service; None if nothing is."""
    if "@" in url or "?" in url:
        return "must hold neither a name, a password nor parameters; name the variable with the key in `key_env`"
    return None if _URL.fullmatch(url) else "expected a URL such as http://localhost:8000/v1"


def key_from(variable: str | None, where: str) -> str | None:
    """Return the key in an environment variable; None without a variable. `where`: the option that names it. Raises
    UserError if it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        # only what looks like a variable is quoted, in case the key itself was written
        name = variable if variable.isupper() else "named there"
        raise UserError(f"{where}: environment variable {name} is not set; export it with the server's key")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{where}: the key in {variable} has characters that no HTTP header can hold")
    KEYS.add(key)
    return key
