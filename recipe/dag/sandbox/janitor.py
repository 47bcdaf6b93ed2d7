"""Clears up after a server, however it ended: `python -I janitor.py ROOT`, with the server at the other end of stdin.

Invariant: when stdin ends, the server is gone; then its jobs are ended, and ROOT and what stdin named, one path a line,
are removed. It uses the standard library and `removal.py` beside it alone, so that a process of a few megabytes can
wait.
"""

import importlib.util
import os
import signal
import sys
import time
from contextlib import suppress

MARKER = b"SANDBOX_JOB="
ROUNDS = 50


def jobs_under(root):
    """Processes whose environment or working directory says that they are a job's."""
    prefix = os.fsencode(root) + b"/"
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            where = os.fsencode(os.readlink(f"/proc/{name}/cwd"))
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = any(entry.startswith(MARKER + prefix) for entry in file.read().split(b"\0"))
            if marked or (where + b"/").startswith(prefix):
                yield int(name)


def main():
    root = sys.argv[1]
    removal = load_removal()
    meant = None
    with suppress(OSError):
        # Held open: what takes its name after it must not be taken for it.
        meant = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Its terminal's signals are for the server; the end of stdin is what counts here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    named = b""
    while piece := os.read(0, 4096):
        named += piece
    for _ in range(ROUNDS):
        left = set(jobs_under(root)) - {os.getpid()}
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if meant is not None:
            removal.remove(root, meant)
        if not left and (meant is None or not removal.leads_to(root, meant)):
            break
        time.sleep(0.1)
    for path in named.splitlines():
        with suppress(OSError):
            os.unlink(path)


def load_removal():
    """`python -I` finds no module of this package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "removal.py")
    spec = importlib.util.spec_from_file_location("removal", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


main()
