"""The first process of a jail that bubblewrap made.

Invariant: it becomes the same supervisor as in a warm jail, and adds nothing to bubblewrap's isolation but limits.
"""

from __future__ import annotations

import os
import signal
import socket

from recipe.dag.sandbox.jail import inside, protocol, supervisor


def main(number: int) -> None:
    """number: of the connection's descriptor. Never returns."""
    connection = socket.socket(fileno=number)
    try:
        settings, _ = protocol.receive(connection)
    except protocol.Closed:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.umask(0o022)
    supervisor.Supervisor(connection, settings, lambda: inside.make_places(settings["places"]), None, 0).run()
