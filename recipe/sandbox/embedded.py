"""`python -m recipe.sandbox.embedded`: runs the server for as long as the process at the other end of stdin lives.

Invariant: the first line of stdin is JSON, the Options, and the second the token; the one line of stdout is JSON, the
address or the error. Nothing is passed in arguments or the environment, where jobs and other users could read it.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from recipe.sandbox.errors import CannotIsolate, CannotStart
from recipe.sandbox.server import Options, check, run


def main() -> None:
    # Unbuffered, so that the token is not read before `run` asks for it.
    lines = io.FileIO(0, closefd=False)
    options = Options(**json.loads(lines.readline()))

    def announce(hello: dict[str, Any]) -> None:
        asyncio.get_running_loop().add_reader(0, _end_with_parent)
        print(json.dumps(hello), flush=True)

    try:
        check(options, with_token=True)
        run(options, lambda: lines.readline().decode().strip(), announce)
    except CannotStart as error:
        with suppress(BrokenPipeError):  # the parent has ended meanwhile
            os.write(1, json.dumps({"error": str(error), "cannot_isolate": isinstance(error, CannotIsolate)}).encode())
        sys.exit(2)


def _end_with_parent() -> None:
    if not os.read(0, 4096):
        asyncio.get_running_loop().remove_reader(0)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
