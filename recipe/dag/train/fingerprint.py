"""What makes a run the experiment that it is, and how two experiments differ.

Invariant: plain JSON, a function of what is learned from: workflow, the code that it names, models, problems and
configuration. Where something lies, how it is computed (devices, memory, batches of a pass), how long, and what is
reported does not count. Validation decides nothing that is learned, so it is compared apart from the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig

from recipe.dag.algorithms.custom import Custom
from recipe.dag.report.secrets import without_secrets
from recipe.dag.train.data import Sample
from recipe.dag.train.digest import file_digest, model_digest, samples_digest
from recipe.dag.train.learned_config import flatten, is_learned, learned_config, repeated_keys
from recipe.dag.train.models import ModelPaths
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_files import portable_ref, user_files

Items = dict[str, Any]
_SECTIONS = ("actor_rollout_ref", "critic", "config")
"""What holds keys of verl's configuration, dotted."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    items: Items
    """What a checkpoint keeps, without secrets: `learned` (workflow, files, models, data, configuration) and
    `validation`."""
    chosen: Items
    """Without the workflow's options that are as by default: one that an earlier version did not know is no difference
    unless it is among these."""
    repeats: Mapping[str, str]
    """Key of the configuration -> the key whose value it takes over."""


def fingerprint_of(
    run: DictConfig, workflow: Workflow, models: ModelPaths, train: list[Sample], validation: list[Sample]
) -> Fingerprint:
    """Read the files and models that the workflow names. Raises OSError."""
    critics = any(policy.critic is not None for policy in workflow.policies.values())
    learned = {
        "files": {name: file_digest(path) for name, path in user_files(workflow).items()},
        "models": _models(workflow, models),
        "data": {"data.train_files": _data(run.data.train_files, train)},
        "configuration": learned_config(run, critics=critics),
    }
    data = _data(run.data.val_files, validation)
    variants = []
    for defaults in (True, False):
        dump = workflow.model_dump(mode="json", exclude_defaults=not defaults)
        sampling = {agent["name"]: agent.pop("validation", {}) for agent in dump["agents"]}
        checked = {"agents": sampling, "data.val_files": data, "validation.n": run.validation.n}
        variants.append({"learned": {"workflow": _canonical(workflow, dump), **learned}, "validation": checked})
    return Fingerprint(*map(without_secrets, variants), repeated_keys(run))


def differences(stored: Items, now: Fingerprint) -> tuple[list[str], list[str]]:
    """Return (what is learned otherwise, what is validated otherwise), a line each: where it was what, and is what
    now."""
    pairs = {kind: (stored.get(kind, {}), now.items[kind], now.chosen[kind]) for kind in ("learned", "validation")}
    learned = dict(_differing(*pairs["learned"], ()))
    paths = {path[-1] for path in learned}
    lines = [line for path, line in learned.items() if now.repeats.get(path[-1]) not in paths]
    return lines, [line for _, line in _differing(*pairs["validation"], ())]


def _models(workflow: Workflow, models: ModelPaths) -> Items:
    digest = cache(model_digest)
    paths = {f"policies.{name}.model": path for name, path in models.policies.items()}
    paths |= {f"policies.{name}.critic.model": path for name, path in models.critics.items()}
    paths |= {"algorithm.mixer.encoder.model": models.encoder} if models.encoder is not None else {}
    tokenizers = {name: policy.model.tokenizer_path for name, policy in workflow.policies.items()}
    paths |= {f"policies.{name}.model.tokenizer_path": path for name, path in tokenizers.items() if path is not None}
    return {key: {"name": path, "digest": digest(path)} for key, path in paths.items()}


def _data(files: Any, samples: list[Sample]) -> Items:
    names = [files] if isinstance(files, str) else list(files or ())
    return {"name": f"{', '.join(names) or 'none'}, {len(samples)} problems", "digest": samples_digest(samples)}


def _canonical(workflow: Workflow, dump: Items) -> Items:
    """`dump` without names, places and resources; agents and nodes by their names, code by its portable name."""
    for key in ("path", "description", "dag_id", "warnings"):
        dump.pop(key, None)
    for key in ("on_user_error", "max_masked"):  # they decide whether a run goes on, not what it learned so far
        dump.get("episode", {}).pop(key, None)
    for agent in dump["agents"]:
        for tool in agent.get("tools", ()):
            if tool.get("path") is not None:
                tool["path"] = portable_ref(tool["path"], workflow.path)
    for node in dump["nodes"]:
        _canonical_node(node, workflow)
    for policy in dump["policies"].values():
        _canonical_policy(policy)
    for env in dump.get("envs", {}).values():
        env["path"] = portable_ref(env["path"], workflow.path)
    if isinstance(workflow.algorithm, Custom) and "algorithm" in dump:
        dump["algorithm"]["estimator"] = portable_ref(workflow.algorithm.estimator, workflow.path)
    dump["agents"] = {agent.pop("name"): agent for agent in dump["agents"]}
    dump["nodes"] = {node.pop("node_id"): node for node in dump["nodes"]}
    if (encoder := ((dump.get("algorithm") or {}).get("mixer") or {}).get("encoder")) and encoder.get("model"):
        _drop_place(encoder["model"])
    return dump


def _canonical_node(node: Items, workflow: Workflow) -> None:
    node.pop("node_type", None)
    group = node.pop("agent_group", 0)
    if node["node_id"] in {rollout.node_id for rollout in workflow.rollout_nodes}:
        node["agent"] = workflow.agents[group].name
    options = node.get("agent_options", {})
    for holder, key in ((node, "executable_ref"), (options, "process_path")):
        if holder.get(key) is not None:
            holder[key] = portable_ref(holder[key], workflow.path)
    if options.get("env_path"):
        options["env_path"] = [portable_ref(ref, workflow.path) for ref in options["env_path"]]


def _canonical_policy(policy: Items) -> None:
    policy.pop("gpus", None)
    _drop_place(policy["model"])
    critic = policy.get("critic") or {}
    if critic.get("model"):
        _drop_place(critic["model"])
    for holder, section in ((policy, "actor_rollout_ref"), (critic, "critic")):
        if "config" in holder:
            holder["config"] = {k: v for k, v in flatten(holder["config"]) if is_learned(f"{section}.{k}")}


def _drop_place(model: Items) -> None:
    """Its content is among the models."""
    model.pop("path", None)
    model.pop("tokenizer_path", None)


def _differing(was: Items, now: Items, chosen: Items, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, line) of each difference, the outermost where one side has nothing at all."""
    for key in sorted({*was, *now}):
        where = (*path, key)
        if key not in was:
            if key in chosen:
                yield where, f"{_place(where)}: was not there, now {_shown(now[key])}"
        elif key not in now:
            if path[-1:] == ("algorithm",) or path[-2:] == ("algorithm", "mixer"):
                continue  # the estimator does not read it; if it did before, the estimator is another one
            if path and path[-1] in _SECTIONS and (was[key] == {} or not is_learned(key)):
                continue  # an earlier version counted it
            yield where, f"{_place(where)}: was {_shown(was[key])}, now not there"
        elif _is_content(was[key]) and _is_content(now[key]):
            # content that one of the runs could not see, such as a hub's model that was not in the cache yet
            by = "digest" if was[key]["digest"] and now[key]["digest"] else "name"
            if was[key][by] != now[key][by]:
                yield where, f"{_place(where)}: was {_shown(was[key])}, now {_shown(now[key])}"
        elif isinstance(was[key], dict) and isinstance(now[key], dict):
            inner = chosen.get(key, {})
            yield from _differing(was[key], now[key], inner if isinstance(inner, dict) else {}, where)
        elif was[key] != now[key]:
            yield where, f"{_place(where)}: was {_shown(was[key])}, now {_shown(now[key])}"


def _is_content(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"name", "digest"}


def _place(path: Iterable[str]) -> str:
    """As the user writes it: a file by its name, keys of the configuration and models by theirs alone."""
    section, *keys = path
    if section == "files":
        return f"content of {'/'.join(keys)}" if keys else "files"
    if section in ("configuration", "models", "data"):
        return keys[-1] if keys else section
    return ".".join(keys) if section == "workflow" and keys else ".".join((section, *keys))


def _shown(value: Any) -> str:
    if _is_content(value):
        return f"{value['name']} ({value['digest'] or 'unknown content'})"
    if isinstance(value, dict):
        return "there"
    return str(value) if len(str(value)) <= 80 else f"{str(value)[:77]}..."
