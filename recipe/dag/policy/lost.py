"""What a run lost when it failed: a machine of its Ray, or a process.

Invariant: only what ended by itself counts, not what the run ended. Machines are asked directly, since Ray takes half a
minute to give one up.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.core.errors import UserError

CONNECT_S, DEATH_S = 5.0, 2.0
"""Seconds that a machine may take to answer, and after which Ray knows a process as dead that others miss."""
CRASH = "SYSTEM_ERROR"
"""Ray's kind of an exit that nobody asked for."""


def lost_machine(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of `nodes` (entries of `ray.nodes()`) whose Ray does not answer, as address and id; "" if all
    do."""
    for node in nodes:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), CONNECT_S).close()
        except OSError:
            return f"{node['NodeManagerAddress']} ({node['NodeID'][:12]})"
    return ""


def lost_process(error: BaseException) -> str:
    """Return the first process of the run that crashed, with Ray's reason; "" if none did, or if `error`, with which
    the run ended, cannot come from that. One of Ray's may come shortly before Ray knows of the process."""
    import ray
    from ray._private.state import actors
    from ray.exceptions import RayError

    if not isinstance(error, RayError | UserError):
        return ""
    job = ray.get_runtime_context().get_job_id()
    deadline = time.monotonic() + (DEATH_S if isinstance(error, RayError) else 0.0)
    while True:
        dead = actors(job_id=ray.JobID.from_hex(job), actor_state_name="DEAD").values()
        crashed = [actor for actor in dead if CRASH in _reason(actor)]
        if crashed:
            first = min(crashed, key=lambda actor: actor["EndTime"])
            place = f"{first['ActorClassName']}, pid {first['Pid']} on {first['Address']['IPAddress']}"
            return f"{place}: {_detail(_reason(first))}"
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.1)


def _reason(actor: Mapping[str, Any]) -> str:
    return actor["DeathCause"].actor_died_error_context.error_message


def _detail(reason: str) -> str:
    """Return Ray's explanation without what precedes it and without its list of common causes."""
    detail = " ".join(reason.split()).rpartition("Worker exit detail: ")[2]
    return detail.partition(" Some common causes")[0].rstrip(". ")
