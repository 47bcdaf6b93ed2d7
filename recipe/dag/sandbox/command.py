"""`verl-dag sandbox serve`: the server by itself.

Invariant: it says at its start how programs are isolated, or in one line why it does not start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.sandbox.serve import CannotIsolate, Options, check, run

_GO_ON = (
    "; to go on without a security boundary, where programs run as this user with limits only, add "
    "--isolation=rlimits --i-accept-unsandboxed"
)


def serve(token_file: Path | None, **given: Any) -> None:
    """given: Options. Raises UserError."""
    options = Options(**given)
    check(options, with_token=token_file is not None)

    def announce(hello: dict[str, Any]) -> None:
        print(
            f"sandbox at {hello.get('url') or hello['socket']}: isolation {hello['isolation']} "
            f"(engine {hello['engine']}), {hello['slots']} programs at once, "
            f"{'token needed' if token_file is not None else 'no token'}",
            flush=True,
        )
        if hello["isolation"] != "full":
            print("no security boundary: programs run as this user, with its files and network", flush=True)

    try:
        run(options, lambda: _token(token_file), announce)
    except CannotIsolate as error:
        raise UserError(f"{error}{_GO_ON if options.isolation == 'full' else ''}") from None


def _token(path: Path | None) -> str:
    """The first line of the file. Raises UserError."""
    if path is None:
        return ""
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path}: {error}") from None
    if not token.isascii() or len(token) < 16:
        raise UserError(f"--token-file {path}: its first line must be at least 16 ASCII characters")
    return token
