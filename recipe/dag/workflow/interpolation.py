"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in a text; the default may contain further ones.

Invariant: a workflow keeps the text as written; the environment is read when a run needs the value, never at load time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from recipe.dag.core.errors import UserError

_OPEN = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\s*([,}])")


def check_env(text: str) -> str | None:
    """Return the error message for an invalid `${...}` in the text, or None."""
    try:
        _expand(text, None, "")
    except ValueError as error:
        return str(error)
    return None


def resolve_env(text: str, where: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Replace the variables of the text by their values. `where` names the option in the error. Raises UserError."""
    try:
        return _expand(text, os.environ if environ is None else environ, where)
    except ValueError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from error


def _expand(text: str, environ: Mapping[str, str] | None, where: str) -> str:
    """Replace the variables of the text, or only check its syntax if `environ` is None. Raises ValueError for a syntax
    error, UserError for a variable that is not set."""
    done, position = "", 0
    while (start := text.find("${", position)) >= 0:
        done += text[position:start]
        opened = _OPEN.match(text, start)
        if opened is None:
            raise ValueError(f"write `${{oc.env:NAME}}` or `${{oc.env:NAME,default}}`, got `{text[start:]}`")
        name, default, position = opened[1], None, opened.end()
        if opened[2] == ",":
            end = _closing(text, start)
            default, position = text[position:end].strip(), end + 1
            _expand(default, None, where)
        if environ is None:
            continue
        if name in environ:
            done += environ[name]
        elif default is not None:
            done += _expand(default, environ, where)
        else:
            needs = f"; {where} needs it" if where else ""
            raise UserError(f"environment variable {name} is not set{needs}")
    return done + text[position:]


def _closing(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start + 1`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0 and text[index] == "}":
            return index
    raise ValueError(f"a `}}` is missing in `{text[start:]}`")
