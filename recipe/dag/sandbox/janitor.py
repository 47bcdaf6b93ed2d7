"""Clears up after a server, however it ended: `python -I janitor.py ROOT`, with the server at the other end of stdin.

Invariant: when stdin ends, the server is gone; then its jobs are ended, and ROOT and the files that stdin named are
removed, each as `IDENTITY PATH` (see `removal.identity`) and ended by a NUL. It uses the standard library and two
modules beside it alone, so that a process of a few megabytes can wait.
"""

import importlib.util
import os
import signal
import sys
import time
from contextlib import suppress

ROUNDS = 50


def load(name):
    """`python -I` finds no module of this package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    root = sys.argv[1]
    removal, survivors = load("removal"), load("survivors")
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
        left = survivors.kill_jobs(root)
        if meant is not None:
            removal.remove(root, meant)
        if not left and (meant is None or not removal.leads_to(root, meant)):
            break
        time.sleep(0.1)
    for entry in named.split(b"\0")[:-1]:
        identity, _, path = entry.partition(b" ")
        removal.unlink(path, identity.decode())


main()
