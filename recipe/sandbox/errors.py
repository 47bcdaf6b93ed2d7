"""Why a server does not run.

Invariant: a message says what is wrong and how to fix it, in one line.
"""

from __future__ import annotations


class CannotStart(Exception):
    """The server cannot start, or not again."""


class CannotIsolate(CannotStart):
    """This machine does not allow the requested isolation."""
