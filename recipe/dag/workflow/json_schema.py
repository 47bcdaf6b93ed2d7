"""The JSON schema of workflow files, for completion and checks in editors.

Invariant: generated from the classes that the loader reads files with, including descriptions. Checks that need more
than one place of the file (an undeclared name, an option without an effect) are left to `verl-dag validate`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from recipe.dag.algorithms.catalogue import DEFAULT, ESTIMATORS, Custom
from recipe.dag.workflow.agent_schema import Agent, Policy, ToolSpec
from recipe.dag.workflow.node import KEYS, KINDS, OPTIONS, Node, SubWorkflow, readers
from recipe.dag.workflow.schema import EnvSpec, EpisodeSpec, Loop

PIECES: tuple[type[BaseModel], ...] = (Agent, Policy, ToolSpec, EnvSpec, EpisodeSpec, Loop, Node, SubWorkflow)
TEXTS = {"type": "array", "items": {"type": "string"}}
ONE_OR_MORE = {"anyOf": [{"type": "string"}, TEXTS]}
WRITTEN_AS: dict[tuple[str, str], dict[str, Any]] = {
    ("Agent", "tools"): {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ToolSpec"}]}},
    **{(model, "stop"): ONE_OR_MORE for model in ("Sampling", "ValidationSampling")},
    **{(model, "after"): ONE_OR_MORE for model in ("Node", "SubWorkflow")},
    ("Node", "env"): ONE_OR_MORE,
    ("Lora", "targets"): ONE_OR_MORE,
    ("Policy", "reference"): {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/Reference"}]},
}
"""Fields that accept more forms in a file than in the object."""
KEPT = {"description", "default", "title"}


def workflow_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a workflow file."""
    methods = (*ESTIMATORS.values(), Custom)
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in (*PIECES, *methods)]
    _, collected = models_json_schema(models)
    definitions: dict[str, Any] = collected["$defs"]
    _describe(definitions, {model for model, _ in models})
    for (model, name), form in WRITTEN_AS.items():
        written = definitions[model]["properties"][name]
        definitions[model]["properties"][name] = form | {key: value for key, value in written.items() if key in KEPT}
    definitions["Node"] = _node(definitions)
    definitions["Algorithm"] = _algorithm()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A verl-dag workflow",
        "type": "object",
        "required": ["dag_id", "agents", "policies", "nodes"],
        "properties": {
            "dag_id": {"type": "string", "description": "The workflow's name."},
            "description": {"type": "string", "description": "The workflow's purpose, printed by `verl-dag plan`."},
            "global_config": {"type": "object", "description": "Values for `!Ref global_config.a.b`."},
            "agents": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Agent"}},
            "policies": _named("Policy"),
            "tools": _named("ToolSpec"),
            "envs": _named("EnvSpec"),
            "episode": {"$ref": "#/$defs/EpisodeSpec"},
            "loops": _named("Loop"),
            "algorithm": {"$ref": "#/$defs/Algorithm"},
            "nodes": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/Node"}},
        },
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


def _named(model: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": {"$ref": f"#/$defs/{model}"}}


def _node(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an entry of `nodes`: a node, whose other keys depend on its kind, or a sub-workflow."""
    node, included = (definitions[name]["properties"] for name in ("Node", "SubWorkflow"))
    for option in OPTIONS:
        node[option]["description"] = f"{node[option]['description']} Only {readers(option)} read this."
    read = {"workflow": list(included)}
    for key in KEYS:
        options = {option for kind in KINDS.values() if kind.key == key for option in kind.reads}
        read[key] = [name for name in node if name == key or name in options or name not in (*OPTIONS, *KEYS)]
    return {
        "type": "object",
        "properties": included | node,
        "additionalProperties": False,
        "required": ["id"],
        "dependentSchemas": {key: {"propertyNames": {"enum": names}} for key, names in read.items()},
    }


def _algorithm() -> dict[str, Any]:
    """Return the schema of `algorithm`, whose keys depend on the estimator."""
    by_estimator: dict[str, Any] = {"$ref": f"#/$defs/{DEFAULT.__name__}"}
    for name, method in ESTIMATORS.items():
        by_estimator = _if_estimator({"const": name}, {"$ref": f"#/$defs/{method.__name__}"}, by_estimator)
    by_estimator = _if_estimator({"pattern": ":"}, {"$ref": f"#/$defs/{Custom.__name__}"}, by_estimator)
    estimator = {
        "description": "The estimator of advantages: a shipped one, or your own as `file.py:function`.",
        "anyOf": [{"enum": list(ESTIMATORS)}, {"type": "string", "pattern": ":"}],
    }
    return {"type": "object", "properties": {"estimator": estimator}, **by_estimator}


def _if_estimator(test: dict[str, Any], then: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
    condition = {"required": ["estimator"], "properties": {"estimator": test}}
    return {"if": condition, "then": then, "else": otherwise}


def _describe(definitions: dict[str, Any], models: set[type[BaseModel]]) -> None:
    """Add the docstrings of fields as their descriptions, for every model in `definitions`."""
    by_name = {model.__name__: model for model in _related(models)}
    for name, definition in definitions.items():
        model = by_name.get(name)
        for field, written in definition.get("properties", {}).items() if model is not None else ():
            if text := _docstrings(model).get(field):
                written["description"] = text


def _related(models: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """Return the models and all models of the modules that define them, their bases, or a model used there."""
    modules = {sys.modules[base.__module__] for model in models for base in model.__mro__ if _is_model(base)}
    members = [value for module in modules for value in vars(module).values() if _is_model(value)]
    modules |= {sys.modules[value.__module__] for value in members}
    return {value for module in modules for value in vars(module).values() if _is_model(value)}


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseModel)


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the strings below the fields of a class and its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not _is_model(base) or base is BaseModel:
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, below in zip(body, body[1:], strict=False):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            constant = below.value if isinstance(below, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                texts[statement.target.id] = inspect.cleandoc(constant.value).replace("\n", " ")
    return texts
