"""Clears up after a server, however it ended: `python -I janitor.py ROOT`, with the server at the other end of stdin.

Invariant: when stdin ends, the server is gone; then its jobs are ended, and ROOT and what stdin named, one path a line,
are removed. It stands alone and uses the standard library only, so that a process of a few megabytes can wait.
"""

import os
import shutil
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
        shutil.rmtree(root, onerror=unlock)
        if not left and not os.path.lexists(root):
            break
        time.sleep(0.1)
    for path in named.splitlines():
        with suppress(OSError):
            os.unlink(path)


def unlock(_function, path, _error):
    """Again, where a job took away its own permissions."""
    with suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


main()
