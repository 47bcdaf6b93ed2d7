"""Cleans up after a process, however it ended: `python -I reaper.py ROOT`, with that process at the other end of stdin.

Invariant: when stdin ends, the process is gone, and if it was a server, its jobs are ending; then ROOT is removed. It
imports only the standard library and two modules of this package, so that the waiting process takes a few megabytes.
"""

import importlib.util
import os
import signal
import sys
import time
from contextlib import suppress

ROUNDS = 50


def load(name):
    """Load a module of this folder by its path, since `python -I` cannot import this package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    root = sys.argv[1]
    removal, cgroup = load("removal"), load("jail/cgroup")
    folder = None
    with suppress(OSError):
        # Held open, so that another directory that takes its name later is not removed instead.
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # The terminal's signals are for the server; only the end of stdin ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    for _ in range(ROUNDS if folder is not None else 0):
        removal.remove(root, folder)
        if not removal.leads_to(root, folder):
            break
        time.sleep(0.1)
    cgroup.remove_leftovers()


main()
