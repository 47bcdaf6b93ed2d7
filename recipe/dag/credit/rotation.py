"""Role exchange: which policy plays which role in which step (CORY, arXiv 2410.06101).

Invariant: a pure function of the step, so a resumed run goes on where it was. Bindings rotate; weights, optimizers and
critics stay with their policy.
"""

from __future__ import annotations

from collections.abc import Sequence


def bindings(roles: Sequence[str], policies: Sequence[str], *, every: int, step: int) -> dict[str, str]:
    """Role -> policy in step `step` (from 0): in the first `every` steps as listed, then turned by one place every
    `every` steps; with pioneer and observer that is an exchange. After `every * len(roles)` steps each policy has
    played each role equally long. Raises ValueError unless there are as many policies as roles, all different, and
    `every` is at least 1."""
    if len(set(policies)) != len(roles) or len(policies) != len(roles) or len(set(roles)) != len(roles):
        raise ValueError(f"roles {', '.join(roles)} need as many different policies, got {', '.join(policies)}")
    if every < 1:
        raise ValueError(f"every: {every} is not at least 1")
    if step < 0:
        raise ValueError(f"step: {step} is not at least 0")
    turn = (step // every) % len(roles)
    return {role: policies[(place + turn) % len(roles)] for place, role in enumerate(roles)}
