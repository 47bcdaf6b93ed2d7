"""`python -m recipe.sandbox`: runs the server on its own.

Invariant: at its start it prints how programs are isolated, or one line that says why it cannot start.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from recipe.sandbox.engines import ISOLATIONS
from recipe.sandbox.errors import CannotIsolate, CannotStart
from recipe.sandbox.server import Options, check, run


def serve(arguments: Sequence[str], name: str) -> None:
    """Serve until SIGTERM or SIGINT, over TCP with a fresh token unless the arguments say otherwise. `name`: of the
    command. Raises CannotStart; SystemExit for arguments that cannot be read, and after --help."""
    fields = vars(_parser(name).parse_args(arguments))
    token_file, no_token = fields.pop("token_file"), fields.pop("no_token")
    options = Options(**fields)
    if no_token and token_file is not None:
        raise CannotStart("--no-token and --token-file exclude each other")
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
        raise CannotIsolate(f"{error}{_way_out(options)}") from None


def _parser(name: str) -> argparse.ArgumentParser:
    about = "Serve SandboxFusion's API until SIGTERM or Ctrl-C. The log goes to stderr, one JSON object per line."
    parser = argparse.ArgumentParser(name, description=about, allow_abbrev=False)
    add = parser.add_argument

    def number(option: str, text: str, kind: type = int) -> None:
        add(option, type=kind, metavar="N", help=f"{text} (default: %(default)s)")

    add("--host", help="address; one other than loopback needs a token (default: %(default)s)")
    number("--port", "0 picks a free one")
    add("--socket", metavar="PATH", help="a UNIX socket to listen on instead of a port")
    token_file = "file whose first line is the token to require; without it a new one is printed"
    add("--token-file", metavar="PATH", type=Path, help=token_file)
    add("--no-token", action="store_true", help="answer every process of this machine")
    add("--isolation", choices=ISOLATIONS, help="isolation of programs from this machine (default: %(default)s)")
    unsandboxed: dict[str, Any] = {"action": "store_true", "dest": "accept_unsandboxed"}
    add("--allow-unsandboxed", help="with --isolation=rlimits: programs run as this user", **unsandboxed)
    add("--i-accept-unsandboxed", help=argparse.SUPPRESS, **unsandboxed)  # its old name
    number("--max-concurrent", "programs at once; 0: four per core, at least 8")
    number("--max-queue", "programs that may wait")
    number("--memory-mb", "memory limit of a program if its request has none")
    number("--max-memory-mb", "highest memory limit that a request may have")
    number("--max-sessions", "sessions at once")
    number("--sessions-mb", "size of all sessions' files together")
    number("--grace-s", "seconds that running programs have to end after SIGTERM", float)
    quiet: dict[str, Any] = {"action": "store_const", "const": "warning", "dest": "log_level"}
    add("--quiet", help="log warnings only, not every request", **quiet)
    parser.set_defaults(**asdict(Options()))
    return parser


def _way_out(options: Options) -> str:
    if options.isolation != "rlimits":
        return (
            "; to run without a security boundary (programs run as this user, with resource limits only), add "
            "--isolation=rlimits --allow-unsandboxed"
        )
    return "" if options.accept_unsandboxed else "; accept that with --allow-unsandboxed"


def _read(path: Path) -> str:
    """Return the first line of the file. Raises CannotStart."""
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"--token-file {path}: {error}") from None
    if not token.isascii() or len(token) < 16:
        raise CannotStart(f"--token-file {path}: its first line must be at least 16 ASCII characters")
    return token
