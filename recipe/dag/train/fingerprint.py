"""The fingerprint that identifies a run's experiment, and the differences between two experiments.

Invariant: plain JSON, a function of what determines learning: the workflow, the code that it names, models, problems
and configuration. Paths, the way of computing (devices, memory, micro-batches), the number of steps and reporting do
not count. Validation does not affect learning, so it is compared separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig
from pydantic import BaseModel

from recipe.dag.compat.long_form import is_long, read_node
from recipe.dag.core.flatten import flatten
from recipe.dag.core.frozen import Mark, marked, with_code
from recipe.dag.core.paths import resolve_folder
from recipe.dag.report.secrets import without_secrets
from recipe.dag.settings.learned_config import is_learned, learned_config, repeated_keys
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.passages import read_collection
from recipe.dag.train.data import Sample
from recipe.dag.train.digest import file_digest, items_digest, model_digest
from recipe.dag.train.models import ModelPaths
from recipe.dag.workflow.agent_schema import Reference
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_files import portable_ref, user_files

Items = dict[str, Any]
_SECTIONS = ("actor_rollout_ref", "critic", "config")
"""Names of mappings whose keys are dotted keys of verl's configuration."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies the experiment of a run."""

    items: Items
    """Written to checkpoints, without secrets: `learned` (workflow, files, models, data, configuration) and
    `validation`."""
    chosen: Items
    """`items` without the workflow's options that have their default value. An option that a checkpoint of an earlier
    version lacks counts as a difference only if it is among these."""
    repeats: Mapping[str, str]
    """Key of the configuration -> the key whose value it interpolates."""


def fingerprint_of(
    run: DictConfig, workflow: Workflow, models: ModelPaths, train: list[Sample], validation: list[Sample]
) -> Fingerprint:
    """Return the run's fingerprint, reading the files and models that the workflow names. Raises OSError."""
    critics = any(policy.critic is not None for policy in workflow.policies.values())
    learned = {
        "files": {name: file_digest(path) for name, path in user_files(workflow).items()},
        "models": _models(workflow, models),
        "data": {"data.train_files": _data(run.data.train_files, train)},
        "configuration": learned_config(run, critics=critics),
    }
    data = _data(run.data.val_files, validation)
    portable = with_code(workflow, lambda ref: portable_ref(ref, workflow.path))
    variants = []
    for defaults in (True, False):
        dump = portable.model_dump(mode="json", exclude_defaults=not defaults)
        sampling = {agent["name"]: agent.pop("validation", {}) for agent in dump["agents"]}
        checked = {"agents": sampling, "data.val_files": data, "validation.n": run.validation.n}
        items = {"learned": {"workflow": _canonical(portable, dump), **learned}, "validation": checked}
        variants.append(without_secrets(items))
    complete, without_defaults = variants
    return Fingerprint(complete, without_defaults, repeated_keys(run))


def differences(stored: Items, now: Fingerprint) -> tuple[list[str], list[str]]:
    """Return the differences that affect learning, and those that affect validation, a line each with the old and the
    new value. `stored` is `in_todays_form`."""

    def differing(kind: str) -> Iterator[tuple[tuple[str, ...], str]]:
        return _differing(stored.get(kind, {}), now.items.get(kind, {}), now.chosen.get(kind, {}), ())

    learned = dict(differing("learned"))
    paths = {path[-1] for path in learned}
    lines = [line for path, line in learned.items() if now.repeats.get(path[-1]) not in paths]
    return lines, [line for _, line in differing("validation")]


def in_todays_form(stored: Items) -> Items:
    """Return a checkpoint's fingerprint in the form of the schema; earlier versions stored the long form of nodes, and
    whether a policy has a reference."""
    learned, workflow = stored["learned"], stored["learned"]["workflow"]
    nodes = {name: read_node(node, []).node if is_long(node) else node for name, node in workflow["nodes"].items()}
    references = {True: Reference().model_dump(), False: None}
    policies = {
        name: policy | {"reference": references[kept]} if isinstance(kept := policy.get("reference"), bool) else policy
        for name, policy in workflow["policies"].items()
    }
    return {**stored, "learned": {**learned, "workflow": {**workflow, "nodes": nodes, "policies": policies}}}


def _models(workflow: Workflow, models: ModelPaths) -> Items:
    digest = cache(model_digest)
    paths = {f"policies.{name}.model": path for name, path in models.policies.items()}
    paths |= {f"policies.{name}.critic.model": path for name, path in models.critics.items()}
    paths |= {f"policies.{name}.lora.path": path for name, path in models.adapters.items()}
    paths |= {"algorithm.mixer.encoder.model": models.encoder} if models.encoder is not None else {}
    tokenizers = {name: workflow.policies[name].model.tokenizer_path for name in workflow.local_policies()}
    paths |= {f"policies.{name}.model.tokenizer_path": path for name, path in tokenizers.items() if path is not None}
    return {key: {"name": path, "digest": digest(path)} for key, path in paths.items()}


def _data(files: Any, samples: list[Sample]) -> Items:
    names = [files] if isinstance(files, str) else list(files or ())
    return {"name": f"{', '.join(names) or 'none'}, {len(samples)} problems", "digest": items_digest(samples)}


def _canonical(workflow: Workflow, dump: Items) -> Items:
    """Return the part of a workflow's `dump` that decides what is learned, with agents and nodes by their names."""
    _drop_unlearned(workflow, dump)
    for tool in (tool for agent in dump["agents"] for tool in agent.get("tools", ())):
        _canonical_kwargs(tool, workflow)
    for policy in dump["policies"].values():
        for holder, section in ((policy, "actor_rollout_ref"), (policy.get("critic") or {}, "critic")):
            if "config" in holder:
                values = {key: value for key, value, _ in flatten(holder["config"])}
                holder["config"] = {key: value for key, value in values.items() if is_learned(f"{section}.{key}")}
    dump["agents"] = {agent.pop("name"): agent for agent in dump["agents"]}
    dump["nodes"] = {node.pop("id"): node for node in dump["nodes"]}
    return dump


def _drop_unlearned(value: Any, dump: Any) -> None:
    """Drop the fields of models that are marked as not learned, or as compared by their content."""
    if isinstance(value, BaseModel):
        for name in (*marked(type(value), Mark.UNLEARNED), *marked(type(value), Mark.CONTENT)):
            dump.pop(name, None)
        pairs = [(inner, dump[name]) for name, inner in value if name in dump]
    elif isinstance(value, dict):
        pairs = [(inner, dump[name]) for name, inner in value.items() if isinstance(inner, BaseModel)]
    else:
        pairs = list(zip(value, dump, strict=True)) if isinstance(value, tuple) else []
    for inner, part in pairs:
        _drop_unlearned(inner, part)


def _canonical_kwargs(tool: Items, workflow: Workflow) -> None:
    """Do the same for the options of a built-in tool, and name folders by their content."""
    built_in, kwargs = BUILTIN.get(tool.get("name") or ""), tool.get("kwargs")
    if tool.get("path") is not None or built_in is None or not kwargs:
        return
    for key in marked(built_in.Options, Mark.UNLEARNED):
        kwargs.pop(key, None)
    for key in marked(built_in.Options, Mark.CONTENT):
        if kwargs.get(key) is not None:
            content = read_collection(resolve_folder(kwargs[key], workflow.path), max_mb=float("inf"))
            kwargs[key] = {"name": kwargs[key], "digest": content.digest}


def _differing(was: Items, now: Items, chosen: Items, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, line) of each difference; where a whole mapping is missing on one side, that is one difference."""
    for key in sorted({*was, *now}):
        where = (*path, key)
        if key not in was:
            if chosen.get(key) not in (None, {}):
                yield where, f"{_name_of(where)}: was absent, now {_brief(now[key])}"
        elif key not in now:
            if not _may_be_missing(key, was[key], path):
                yield where, f"{_name_of(where)}: was {_brief(was[key])}, now absent"
        elif _has_keys_to_compare(was[key], now[key]):
            inner = chosen.get(key, {})
            yield from _differing(was[key], now[key], inner if isinstance(inner, dict) else {}, where)
        elif not _is_equal(was[key], now[key]):
            yield where, f"{_name_of(where)}: was {_brief(was[key])}, now {_brief(now[key])}"


def _may_be_missing(key: str, stored: Any, path: tuple[str, ...]) -> bool:
    """Return whether an entry that only the checkpoint has is not a difference."""
    if stored in (None, {}):
        return True
    if path[-1:] == ("algorithm",) or path[-2:] == ("algorithm", "mixer"):
        return True  # the estimator does not read it; if it did before, the estimator itself differs
    return bool(path) and path[-1] in _SECTIONS and not is_learned(key)  # an earlier version counted it


def _has_keys_to_compare(was: Any, now: Any) -> bool:
    return isinstance(was, dict) and isinstance(now, dict) and not (_is_content(was) and _is_content(now))


def _is_equal(was: Any, now: Any) -> bool:
    if not (_is_content(was) and _is_content(now)):
        return was == now
    # by name if one of the runs could not read the content, such as a hub model that was not in the cache yet
    by = "digest" if was["digest"] and now["digest"] else "name"
    return was[by] == now[by]


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"name", "digest"}


def _name_of(path: Iterable[str]) -> str:
    """Return the path as the user writes it: a file by its name, keys of the configuration and models without their
    section."""
    section, *keys = path
    if section == "files":
        return f"content of {'/'.join(keys)}" if keys else "files"
    if section in ("configuration", "models", "data"):
        return keys[-1] if keys else section
    return ".".join(keys) if section == "workflow" and keys else ".".join((section, *keys))


def _brief(value: Any) -> str:
    if _is_content(value):
        return f"{value['name']} ({value['digest'] or 'unknown content'})"
    if isinstance(value, dict):
        return "present"
    return str(value) if len(str(value)) <= 80 else f"{str(value)[:77]}..."
