"""The choice of what isolates programs on this machine.

Invariant: isolation below Landlock is used only if the caller requests it and accepts that it is not a security
boundary; `auto` never chooses it. An engine that cannot start raises Unavailable with the reason.
"""

from __future__ import annotations

from pathlib import Path

from recipe.sandbox.jail.engine import JailEngine
from recipe.sandbox.outcome import Unavailable

ISOLATIONS = ("auto", "full", "landlock", "rlimits")


async def start(isolation: str, accept_unsandboxed: bool, *, root: Path) -> JailEngine:
    """Return a started engine. Raises Unavailable if it cannot start, and for an unknown or unaccepted choice.

    isolation: see `JailEngine`; auto: full, or landlock where the machine does not allow that. root: an existing
    directory that nothing else uses.
    """
    if isolation not in ISOLATIONS:
        raise Unavailable(f"isolation {isolation!r} is not one of {', '.join(ISOLATIONS)}")
    if isolation == "rlimits" and not accept_unsandboxed:
        raise Unavailable(
            "isolation 'rlimits' is not a security boundary: programs run as this user, with its files and network"
        )
    reasons = []
    for candidate in ("full", "landlock") if isolation == "auto" else (isolation,):
        engine = JailEngine(root, candidate)
        try:
            await engine.start()
            return engine
        except Unavailable as error:
            reasons.append(str(error))
    raise Unavailable("; ".join(reasons))
