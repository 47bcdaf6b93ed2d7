"""`verl-dag sandbox serve`: runs the server on its own.

Invariant: at its start it prints how programs are isolated, or one line that says why it cannot start.
"""

from __future__ import annotations

import secrets
from functools import cache
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.sandbox.serve import CannotIsolate, Options, check, run

_FALLBACK_HINT = (
    "; to run without a security boundary (programs run as this user, with resource limits only), add "
    "--isolation=rlimits --allow-unsandboxed"
)


def serve(token_file: Path | None, no_token: bool, **fields: Any) -> None:
    """Serve until SIGTERM or SIGINT, over TCP with a fresh token unless `no_token`. fields: those of Options. Raises
    UserError."""
    options = Options(**fields)
    if no_token and token_file is not None:
        raise UserError("--no-token and --token-file exclude each other")
    with_token = token_file is not None or not (no_token or options.socket)
    check(options, with_token=with_token)

    @cache
    def token() -> str:
        return _read(token_file) if token_file is not None else secrets.token_urlsafe(24) if with_token else ""

    def announce(hello: dict[str, Any]) -> None:
        where = hello.get("url") or hello["socket"]
        needs = f"token in {token_file}" if token_file is not None else "no token"
        if with_token and token_file is None:
            # As part of the URL, since that is all that SandboxFusion's clients take.
            where, needs = where.replace("http://", f"http://token:{token()}@", 1), "token in the URL"
        print(
            f"sandbox at {where}: isolation {hello['isolation']}, {hello['slots']} programs at once, {needs}",
            flush=True,
        )
        if hello["isolation"] == "rlimits":
            print("no security boundary: programs run as this user, with its files and network", flush=True)

    try:
        run(options, token, announce)
    except CannotIsolate as error:
        raise UserError(f"{error}{_FALLBACK_HINT if options.isolation != 'rlimits' else ''}") from None


def _read(path: Path) -> str:
    """Return the first line of the file. Raises UserError."""
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path}: {error}") from None
    if not token.isascii() or len(token) < 16:
        raise UserError(f"--token-file {path}: its first line must be at least 16 ASCII characters")
    return token
