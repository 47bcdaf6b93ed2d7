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

from recipe.dag.algorithms.custom import Custom
from recipe.dag.core.paths import names_function, resolve_folder
from recipe.dag.report.secrets import without_secrets
from recipe.dag.settings.learned_config import is_learned, learned_config, repeated_keys
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.passages import read_collection
from recipe.dag.train.data import Sample
from recipe.dag.train.digest import file_digest, model_digest, samples_digest
from recipe.dag.train.models import ModelPaths
from recipe.dag.workflow.flatten import flatten
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_files import portable_ref, user_files

Items = dict[str, Any]
_API_LIMITS = ("key_env", "max_concurrent", "requests_per_minute", "timeout_s", "retries", "max_wait_s")
_API_LIMITS += ("failures_to_open", "probe_after_s", "price", "budget", "on_budget", "cache")
"""Keys of an API policy that decide how its server is asked, not what it answers."""
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
    variants = []
    for defaults in (True, False):
        dump = workflow.model_dump(mode="json", exclude_defaults=not defaults)
        sampling = {agent["name"]: agent.pop("validation", {}) for agent in dump["agents"]}
        checked = {"agents": sampling, "data.val_files": data, "validation.n": run.validation.n}
        items = {"learned": {"workflow": _canonical(workflow, dump), **learned}, "validation": checked}
        variants.append(without_secrets(items))
    complete, without_defaults = variants
    return Fingerprint(complete, without_defaults, repeated_keys(run))


def differences(stored: Items, now: Fingerprint) -> tuple[list[str], list[str]]:
    """Return the differences that affect learning, and those that affect validation, a line each with the old and the
    new value."""
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
    """Return `dump` without its descriptions, paths and resources, with agents and nodes by their names and code by its
    portable name."""
    for key in ("path", "description", "dag_id", "warnings", "tools"):  # agents hold their tools themselves
        dump.pop(key, None)
    for key in ("on_user_error", "max_masked"):  # they decide whether a run continues, not what it has learned so far
        dump.get("episode", {}).pop(key, None)
    tools = [tool for agent in dump["agents"] for tool in agent.get("tools", ())]
    for tool in tools:
        for key in ("workers", "calls_per_second"):  # they decide when a call runs, not what it returns
            tool.pop(key, None)
        _canonical_kwargs(tool, workflow)
    for named in (*tools, *dump.get("envs", {}).values()):
        if named.get("path") is not None:
            named["path"] = portable_ref(named["path"], workflow.path)
    for node in dump["nodes"]:
        _canonical_node(node, workflow)
    for policy in dump["policies"].values():
        _canonical_policy(policy, workflow)
    _canonical_algorithm(dump.get("algorithm") or {}, workflow)
    dump["agents"] = {agent.pop("name"): agent for agent in dump["agents"]}
    dump["nodes"] = {node.pop("node_id"): node for node in dump["nodes"]}
    return dump


def _canonical_kwargs(tool: Items, workflow: Workflow) -> None:
    """Drop the options of a built-in tool that do not decide what it answers, and name folders by their content."""
    built_in, kwargs = BUILTIN.get(tool.get("name") or ""), tool.get("kwargs")
    if tool.get("path") is not None or built_in is None or not kwargs:
        return
    for key in built_in.unlearned:
        kwargs.pop(key, None)
    for key in built_in.folders:
        if kwargs.get(key) is not None:
            content = read_collection(resolve_folder(kwargs[key], workflow.path), max_mb=float("inf"))
            kwargs[key] = {"name": kwargs[key], "digest": content.digest}


def _canonical_algorithm(algorithm: Items, workflow: Workflow) -> None:
    if isinstance(workflow.algorithm, Custom) and algorithm:
        algorithm["estimator"] = portable_ref(workflow.algorithm.estimator, workflow.path)
    encoder = (algorithm.get("mixer") or {}).get("encoder") or {}
    if encoder.get("model"):
        _drop_paths(encoder["model"])


def _canonical_node(node: Items, workflow: Workflow) -> None:
    node.pop("node_type", None)
    group = node.pop("agent_group", 0)
    if node["node_id"] in {rollout.node_id for rollout in workflow.rollout_nodes}:
        node["agent"] = workflow.agents[group].name
    options = node.get("agent_options", {})
    for holder, key in ((node, "executable_ref"), (options, "process_path")):
        if holder.get(key) is not None:
            holder[key] = portable_ref(holder[key], workflow.path)
    if node.get("executable_kwargs"):
        kwargs = node["executable_kwargs"].items()
        node["executable_kwargs"] = {
            key: portable_ref(value, workflow.path) if names_function(value) else value for key, value in kwargs
        }
    candidates = node.get("candidates") or {}
    if names_function(candidates.get("by")):
        candidates["by"] = portable_ref(candidates["by"], workflow.path)
    if options.get("env_path"):
        options["env_path"] = [portable_ref(ref, workflow.path) for ref in options["env_path"]]


def _canonical_policy(policy: Items, workflow: Workflow) -> None:
    policy.pop("gpus", None)
    api = policy.get("api") or {}
    for key in _API_LIMITS:
        api.pop(key, None)
    if api.get("script") is not None:
        api["script"] = portable_ref(api["script"], workflow.path)
    _drop_paths(policy.get("model") or {})
    critic = policy.get("critic") or {}
    if critic.get("model"):
        _drop_paths(critic["model"])
    for holder, section in ((policy, "actor_rollout_ref"), (critic, "critic")):
        if "config" in holder:
            values = {key: value for key, value, _ in flatten(holder["config"])}
            holder["config"] = {key: value for key, value in values.items() if is_learned(f"{section}.{key}")}


def _drop_paths(model: Items) -> None:
    # the model's content is compared instead (`_models`)
    model.pop("path", None)
    model.pop("tokenizer_path", None)


def _differing(was: Items, now: Items, chosen: Items, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, line) of each difference; where a whole mapping is missing on one side, that is one difference."""
    for key in sorted({*was, *now}):
        where = (*path, key)
        if key not in was:
            if key in chosen:
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
    if path[-1:] == ("algorithm",) or path[-2:] == ("algorithm", "mixer"):
        return True  # the estimator does not read it; if it did before, the estimator itself differs
    in_config = bool(path) and path[-1] in _SECTIONS
    return in_config and (stored == {} or not is_learned(key))  # an earlier version counted it


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
