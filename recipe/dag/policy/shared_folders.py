"""Check that all machines of a run see the same folders.

Invariant: files that one machine writes to a folder that another does not see are lost without an error, so a run that
joined a Ray cluster checks its folders from every machine first. A failed check removes everything that it created.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from recipe.dag.core.errors import UserError

ANSWER_S = 120
"""Seconds that the machines may take to answer: each starts a Python process first."""
Ask = Callable[[Callable[..., str], dict[str, tuple]], dict[str, str]]
"""Runs a function on machines: (function, {node: arguments}) -> {node: result}."""


def check_folders(written: Path | None, read: Iterable[str], nodes: Sequence[str], ask: Ask | None = None) -> None:
    """Raise UserError if one of `nodes` (Ray's ids) does not see a folder in `read`, or does not share `written` with
    this process. Creates `written`; skips hub names in `read`."""
    if not nodes:
        return
    ask = ask or ask_nodes
    folders = sorted({folder for folder in read if os.path.isabs(folder)})
    for node, missing in ask(_missing_function(), {node: (folders,) for node in nodes}).items():
        if missing:
            raise UserError(
                f"{missing}: not on the machine {node[:12]} of the joined Ray; pass a folder that all its machines see"
            )
    if written is not None:
        _check_written(written, nodes, ask)


def _check_written(folder: Path, nodes: Sequence[str], ask: Ask) -> None:
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".probe_{uuid.uuid4().hex}"
    answers = {node: probe.with_name(f"{probe.name}_{node}") for node in nodes}
    where = f"trainer.default_local_dir={folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        reasons = ask(_answer_function(), {node: (str(probe), str(path)) for node, path in answers.items()})
        for node, reason in reasons.items():
            # a listing, because a network file system may cache for a while that a name does not exist
            if not reason and answers[node].name not in os.listdir(folder):
                reason = "files that it writes there are not visible here"
            if reason:
                raise UserError(
                    f"{where}: not shared with the machine {node[:12]} of the joined Ray ({reason}); pass a folder "
                    "that all its machines see"
                )
        created = []  # the check passed, so keep the folders
    except OSError as error:
        raise UserError(f"{where}: cannot be written: {error.strerror or error}") from error
    finally:
        for path in (probe, *answers.values()):
            path.unlink(missing_ok=True)
        for path in created:
            with contextlib.suppress(OSError):  # not empty: another run uses it by now
                path.rmdir()


def _missing_function() -> Callable[[list[str]], str]:
    # Ray pickles nested functions by value: the other machine may have another version of this file, or none
    def first_missing(folders: list[str]) -> str:
        import os

        return next((folder for folder in folders if not os.path.isdir(folder)), "")

    return first_missing


def _answer_function() -> Callable[[str, str], str]:
    def answer(probe: str, path: str) -> str:
        import os

        folder, name = os.path.split(probe)
        if not os.path.isdir(folder) or name not in os.listdir(folder):
            return "it does not see files that are written here"
        try:
            open(path, "w").close()
        except OSError as error:
            return f"it cannot write there: {error.strerror}"
        return ""

    return answer


def ask_nodes(function: Callable[..., str], arguments: dict[str, tuple]) -> dict[str, str]:
    """Run `function` on machines of a joined cluster, with arguments by node id, and return its results. Raises
    UserError if a machine does not answer."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function)
    pending = {
        node: task.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        ).remote(*args)
        for node, args in arguments.items()
    }
    answers = {}
    for node, reference in pending.items():
        try:
            answers[node] = ray.get(reference, timeout=ANSWER_S)
        except RayError as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"the machine {node[:12]} of the joined Ray cannot run Python: {reason}") from error
    return answers
