"""A workflow with values of a command line in it.

Invariant: the text keeps its comments and order; what an edit cannot find a place for is a UserError, never ignored.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from recipe.dag.errors import UserError
from recipe.dag.workflow.importer import import_workflow
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.paths import resolve_path, split_ref

KL_COEF = 0.001
"""verl's default of algorithm.kl_ctrl.kl_coef."""


def edited(source: Path, edits: Mapping[str, Any], *, batch_size: int) -> str:
    """The text of a copy that may lie anywhere; a file in siiRL's form is rewritten into this language's first.
    `edits`: by section and key, as `recipe.marft.flags` makes them. `batch_size`: samples per step, which siiRL's
    mini-batch sizes are parts of. Raises UserError, WorkflowError."""
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 120
    load_workflow(source)  # its mistakes are told at their places in this file, not in the copy
    data = yaml.load(source.read_text())
    if "agents" not in data:
        data = yaml.load(import_workflow(source))
    edits = dict(edits)
    _kl(data, edits)
    for key, value in edits.items():
        section, _, name = key.partition(".")
        if name == "mini_batch_size":
            name, value = "mini_batches", max(1, math.ceil(batch_size / value))
        places = list(_places(data, section, name))
        if not places:
            raise UserError(f"{source}: there is no place for {key}={value}")
        for place in places:
            _set(place, name or section, value)
    _anchor(data, source)
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _anchor(data: Any, source: Path) -> None:
    """Files that the workflow names by a relative path, by their absolute one."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list):
            _anchor(value, source)
        elif isinstance(value, str) and split_ref(value)[0].endswith((".py", ".yaml", ".yml")):
            with suppress(UserError):  # a text that only looks like a file
                file, name = resolve_path(value, source), split_ref(value)[1]
                data[key] = f"{file}:{name}" if name else str(file)


def _places(data: dict[str, Any], section: str, name: str) -> Iterator[dict[str, Any]]:
    if section in ("algorithm", "episode"):
        yield data.setdefault(section, {})
    elif section in ("sampling", "validation"):
        yield from (agent.setdefault(section, {}) for agent in data["agents"])
    elif section == "policy":
        yield from _trained(data)
    elif section == "critic":
        critics = [policy["critic"] for policy in _trained(data) if policy.get("critic") is not None]
        yield from (critic for critic in critics if "share" not in critic)
    elif section == "rewards_with_env":
        options = [node["agent_options"] for node in data.get("nodes") or () if node.get("agent_options")]
        yield from (option for option in options if option.get("env_path"))


def _set(place: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = {"path": value} if key == "model" else value


def _trained(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [policy for policy in data["policies"].values() if not policy.get("frozen")]


def _kl(data: dict[str, Any], edits: dict[str, Any]) -> None:
    """siiRL switches the KL and weighs it by different flags; here a weight of 0 is off, and the reference goes with
    the weights."""
    algorithm = data.setdefault("algorithm", {})
    if (in_loss := edits.pop("use_kl_loss", None)) is not None:
        coef = edits.pop("algorithm.kl_loss_coef", algorithm.get("kl_loss_coef", 0)) if in_loss else 0
        if in_loss and not coef:
            raise UserError(
                "actor_rollout_ref.actor.use_kl_loss=True needs actor_rollout_ref.actor.kl_loss_coef above 0"
            )
        algorithm["kl_loss_coef"] = coef
        edits.pop("algorithm.kl_loss_coef", None)
    coef = edits.pop("kl_coef", KL_COEF)
    if (in_reward := edits.pop("use_kl_in_reward", None)) is not None:
        algorithm["kl_reward_coef"] = coef if in_reward else 0
    if in_loss is None and in_reward is None:
        return
    needed = bool(algorithm.get("kl_loss_coef") or algorithm.get("kl_reward_coef"))
    for policy in _trained(data):
        if needed:
            policy["reference"] = True
        else:
            policy.pop("reference", None)
