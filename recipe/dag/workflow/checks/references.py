"""Checks of the files that a workflow names: they exist, define what is named, and match the engine's calls.

Invariant: the user's files are read, never run, so that checking is fast and has no side effects.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import find_beside, find_source, is_module, names_env, split_ref
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean, listing
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.workflow.agent_schema import Agent, ToolSpec
from recipe.dag.workflow.ast_index import (
    OPAQUE,
    Definition,
    Function,
    Opaque,
    Outline,
    Signature,
    read_outline,
    short_returns,
    signature,
)
from recipe.dag.workflow.interpolation import check_env
from recipe.dag.workflow.node_kinds import KINDS, NodeRole
from recipe.dag.workflow.parse_model import parse_piece
from recipe.dag.workflow.schema import EnvSpec, Node
from recipe.dag.workflow.source import Source

_HOOKS = {"prompt": ("context",), "parse": ("context",)}
_TOKEN_HOOKS = {
    "pre_process": ("tokenizer", "prompt_ids", "obs"),
    "post_process": ("tokenizer", "prompt_ids", "response_ids"),
}
_ENV = {"step": ("actions", "ground_truth")}
_STEP = frozenset({"agents", "agent"})
"""The arguments that `step` may take besides."""
_TOOL = {"execute": ("arguments", "state"), "close": ()}
_OPTIONAL = frozenset({"close"})
# An env need not define reset. It is called with keyword arguments: those of these that it takes.
_RESET = frozenset({"sample", "seed", "sandbox", "agents"})
_CONTEXT = frozenset({"context"})
_SCOPES = {"episode": ("episode",), "group": ("episodes",)}
"""Scope of a reward node -> the leading arguments of its function."""

Target = tuple[Outline, Definition | None]
"""A file and the definition that is named in it; None: the whole file."""


class References:
    """The checks of one workflow; each file is parsed once."""

    def __init__(self, source: Source):
        self.source = source
        self.outlines: dict[Path, Outline] = {}
        self.broken: set[str] = set()
        """Files that have been reported as not valid Python."""

    def check_agent(self, agent: Agent, path: KeyPath) -> Iterator[Problem]:
        declared = self.source.data.get("tools")
        for index, tool in enumerate(agent.tools):
            at = (*path, "tools", index)
            written = _at(self.source.data, at)
            name = written.get("name") if isinstance(written, dict) else written
            if not isinstance(declared, dict) or name not in declared:
                yield from self.check_tool(tool, at, declared=declared if isinstance(declared, dict) else ())
            elif isinstance(written, dict) and "path" in written:
                message = f"`tools.{name}` says which tool it is; remove this, or give the tool another `name`"
                yield self.source.problem((*at, "path"), message, key=True)
            elif isinstance(written, dict) and written.get("kwargs"):
                yield from self._check_overriding_kwargs(tool, ("tools", str(name)), at)

    def check_tool(
        self, tool: ToolSpec, at: KeyPath, *, name: str | None = None, declared: Iterable[str] = ()
    ) -> Iterator[Problem]:
        """Check the tool at `at`. `name`: its key, if it is declared under `tools`. `declared`: the keys there."""
        whole = at if name is not None or isinstance(_at(self.source.data, at), dict) else None
        here = (*at, "path") if whole and tool.path else at
        if tool.path is not None:
            target = yield from self.look_up(tool.path, here, "Class")
            if target is not None:
                yield from self.check_class(target, tool.path, here, _TOOL, tool.kwargs, (*at, "kwargs"))
            return
        called = tool.name or name or ""
        if called not in BUILTIN:
            names = [*BUILTIN, *declared]
            message = f"no tool `{called}`{did_you_mean(called, names)} (your own tool: `file.py:Class`)"
            if not called:
                message = f"give the tool a `name` ({', '.join(BUILTIN)}) or a `path` (`file.py:Class`)"
            yield self.source.problem((*at, "name") if whole and tool.name else at, message)
        else:
            yield from self._check_built_in(called, tool.kwargs, at)

    def _check_built_in(self, name: str, kwargs: dict[str, Any], at: KeyPath) -> Iterator[Problem]:
        """Check the `kwargs` of a built-in tool that is written at `at`."""
        here = (*at, "kwargs")
        options, problems = parse_piece(BUILTIN[name].Options, kwargs, self.source, here)
        yield from problems
        for key, text in kwargs.items():
            if isinstance(text, str) and (message := check_env(text)):
                yield self.source.problem((*here, key), message)
        if options is None or problems:
            return
        for key, message in BUILTIN[name].problems(options, str(self.source.file)):
            yield self.source.problem((*here, key) if key else at, message)

    def _check_overriding_kwargs(self, tool: ToolSpec, base: KeyPath, at: KeyPath) -> Iterator[Problem]:
        """Check the `kwargs` at `at`, merged with those at `base`, whose own mistakes are reported there."""
        if tool.path is None:
            if tool.name is None or tool.name not in BUILTIN:
                return
            own = _at(self.source.data, (*base, "kwargs")) or {}
            known = {problem.message for problem in self._check_built_in(tool.name, own, base)}
            for problem in self._check_built_in(tool.name, tool.kwargs, at):
                if problem.message not in known:
                    yield problem
            return
        target = yield from self.look_up(tool.path, (*base, "path"), "Class")
        outline, owner = target or (None, None)
        if outline is not None and isinstance(owner, ast.ClassDef):
            own = _at(self.source.data, (*base, "kwargs")) or {}
            reported = self.check_constructor(outline, owner, tool.path, at, own, (*base, "kwargs"))
            known = {problem.message for problem in reported}
            problems = self.check_constructor(outline, owner, tool.path, at, tool.kwargs, (*at, "kwargs"))
            yield from (problem for problem in problems if problem.message not in known)

    def check_node(self, node: Node, path: KeyPath) -> Iterator[Problem]:
        options, at = node.agent_options, (*path, "agent_options")
        if node.node_role is NodeRole.ROLLOUT:
            kwargs = (options.pre_process_kwargs, options.post_process_kwargs)
            yield from self.check_hooks(options.process_path, at, kwargs)
            for index, ref in enumerate(options.env_path):
                if not names_env(ref):
                    yield from self.check_env_class(ref, (*at, "env_path", index))
        elif node.executable_ref is not None and (arguments := KINDS[node.node_role].function_takes):
            here, kwargs_at = (*path, "executable_ref"), (*path, "executable_kwargs")
            arguments = _SCOPES.get(node.scope, arguments) if node.node_role is NodeRole.REWARD else arguments
            yield from self.check_function(node.executable_ref, here, arguments, node.executable_kwargs, kwargs_at)
            if node.node_role is NodeRole.REWARD and _at(self.source.data, (*path, "scope")) in (None, *_SCOPES):
                yield from self._check_scope(node, node.executable_ref, here)

    def _check_scope(self, node: Node, ref: str, here: KeyPath) -> Iterator[Problem]:
        """Check that the name of a reward function's first argument does not contradict the node's scope."""
        first = self._first_argument(ref, here)
        other = next((scope for scope, names in _SCOPES.items() if scope != node.scope and first == names[0]), None)
        if other is not None:
            message = f"`{ref}` takes `{first}`, so write `scope: {other}`"
            yield self.source.problem(here, f"{message}, or rename the argument to `{_SCOPES[node.scope][0]}`")

    def _first_argument(self, ref: str, here: KeyPath) -> str | None:
        (_, name), base = split_ref(ref), Path(self.source.origin(here).source.file)
        try:
            target = self.follow(self.read(ref, base), name, base) if name else None
        except (UserError, SyntaxError, ValueError):
            return None  # reported where it is looked up
        if target is None or not isinstance(target[1], Function):
            return None
        arguments = target[1].args
        return next((argument.arg for argument in (*arguments.posonlyargs, *arguments.args)), None)

    def check_env(self, env: EnvSpec, path: KeyPath) -> Iterator[Problem]:
        yield from self.check_env_class(env.path, (*path, "path"), env.kwargs, (*path, "kwargs"))

    def check_script(self, script: str, path: KeyPath) -> Iterator[Problem]:
        yield from self.check_function(script, path, ("messages",), {}, path)

    def check_env_class(
        self, ref: str, at: KeyPath, kwargs: dict[str, Any] | None = None, kwargs_at: KeyPath = ()
    ) -> Iterator[Problem]:
        target = yield from self.look_up(ref, at, "Class")
        if target is None:
            return
        yield from self.check_class(target, ref, at, _ENV, kwargs, kwargs_at)
        outline, owner = target
        reset = outline.method(owner, "reset") if isinstance(owner, ast.ClassDef) else None
        if reset is not None:
            shape = signature(reset, method=True)
            yield from self.check_call(shape, (), {}, f"reset of `{ref}`", at, at, _RESET)

    def check_hooks(
        self, ref: str | None, at: KeyPath, kwargs: tuple[dict[str, Any], dict[str, Any]]
    ) -> Iterator[Problem]:
        """Check the hooks of a node. `kwargs`: those of the hook that makes the prompt, and of the one that parses."""
        keys = ("pre_process_kwargs", "post_process_kwargs")
        if ref is None:
            for key in (key for key, options in zip(keys, kwargs, strict=True) if options):
                yield self.source.problem((*at, key), "has no effect without `hooks`; remove it", key=True)
            return
        here = (*at, "process_path")
        target = yield from self.look_up(ref, here, None)
        if target is None or target[1] is OPAQUE:
            return
        outline, owner = target
        if owner is not None and not isinstance(owner, ast.ClassDef):
            message = f"`{ref}` is a function; name the file, or a class with prompt or parse"
            yield self.source.problem(here, message)
            return
        if isinstance(owner, ast.ClassDef):
            yield from self.check_constructor(outline, owner, ref, here)
        hooks = _hooks_of(outline, owner)
        if not any(hooks.values()):
            yield self.source.problem(here, f"`{ref}` defines neither prompt nor parse")
            return
        arguments = _HOOKS | _TOKEN_HOOKS
        for (name, hook), key, options in zip(hooks.items(), keys, kwargs, strict=True):
            if hook is None and options:
                message = f"`{ref}` defines no {name} that could take this; remove it"
                yield self.source.problem((*at, key), message, key=True)
            if hook is None:
                continue
            shape = signature(hook, method=owner is not None) if not isinstance(hook, ast.ClassDef) else OPAQUE
            optional = frozenset[str]() if name in _HOOKS else _CONTEXT
            hook_name = f"{name} of `{ref}`"
            yield from self.check_call(shape, arguments[name], options, hook_name, here, (*at, key), optional)

    def check_function(
        self,
        ref: str,
        here: KeyPath,
        arguments: tuple[str, ...],
        kwargs: dict[str, Any],
        kwargs_at: KeyPath,
        *,
        or_method: str | None = None,
    ) -> Iterator[Problem]:
        """Check the function `ref`, written at `here`, that is called with `arguments` and `kwargs`. `or_method` also
        allows a class, built with `kwargs`, whose method of this name is called with `arguments`."""
        target = yield from self.look_up(ref, here, "function")
        if target is None or target[1] is None or target[1] is OPAQUE:
            return
        if not isinstance(target[1], ast.ClassDef):
            shape = signature(target[1], method=False)
            yield from self.check_call(shape, arguments, kwargs, f"`{ref}`", here, kwargs_at, optional=frozenset())
        elif or_method is not None:
            yield from self.check_class(target, ref, here, {or_method: arguments}, kwargs, kwargs_at)
        else:
            yield self.source.problem(here, f"`{ref}` is a class; name a function")

    def check_class(
        self,
        target: Target,
        ref: str,
        here: KeyPath,
        methods: dict[str, tuple[str, ...]],
        kwargs: dict[str, Any] | None = None,
        kwargs_at: KeyPath = (),
    ) -> Iterator[Problem]:
        """Check a class that is built with `kwargs` and has `methods`: name -> arguments of the call."""
        outline, owner = target
        if owner is OPAQUE:
            return
        if not isinstance(owner, ast.ClassDef):
            yield self.source.problem(here, f"`{ref}` is a function; name a class with {listing(methods)}")
            return
        yield from self.check_constructor(outline, owner, ref, here, kwargs or {}, kwargs_at)
        needed = [name for name in methods if name not in _OPTIONAL]
        if missing := [name for name in needed if outline.method(owner, name) is None]:
            yield self.source.problem(here, f"`{ref}` has no method {listing(missing)}; it needs {listing(needed)}")
        for name, arguments in methods.items():
            method = outline.method(owner, name)
            if method is None:
                continue
            if methods is _TOOL and isinstance(method, ast.FunctionDef) and not method.decorator_list:
                yield self.source.problem(here, f"{name} of `{ref}` must be `async def`")
                continue
            if methods is _ENV and isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                for line, count in short_returns(method):
                    problem = f"step of `{ref}` returns {count} values in line {line}"
                    yield self.source.problem(here, f"{problem}, not (obs, reward, done) or (obs, reward, done, info)")
            shape, optional = signature(method, method=True), _STEP if methods is _ENV else _CONTEXT
            if methods is _ENV and isinstance(shape, Signature) and not any(shape.misfits((), arguments, _STEP)):
                arguments, optional = (), frozenset(arguments) | _STEP  # keyword arguments may come in any order
            yield from self.check_call(shape, arguments, {}, f"{name} of `{ref}`", here, here, optional)

    def check_constructor(
        self,
        outline: Outline,
        owner: ast.ClassDef,
        ref: str,
        here: KeyPath,
        kwargs: dict[str, Any] | None = None,
        kwargs_at: KeyPath = (),
    ) -> Iterator[Problem]:
        init = outline.method(owner, "__init__")
        bare = OPAQUE if outline.decorated(owner) else Signature((), 0, 0, False, {}, False)
        shape = bare if init is None else signature(init, method=True)
        if isinstance(shape, Signature):
            how = "with `kwargs` alone" if kwargs else "without arguments"
            for keyword, text in shape.misfits((), kwargs or {}, frozenset()):
                at = (*kwargs_at, keyword) if keyword else here
                message = f"`{ref}` is built {how}, but __init__ {text}"
                yield self.source.problem(at, message, key=bool(keyword))

    def check_call(
        self,
        shape: Signature | Opaque,
        arguments: tuple[str, ...],
        kwargs: dict[str, Any],
        name: str,
        here: KeyPath,
        kwargs_at: KeyPath,
        optional: frozenset[str] = _CONTEXT,
    ) -> Iterator[Problem]:
        if not isinstance(shape, Signature):
            return
        if shape.generator:
            yield self.source.problem(here, f"{name} yields, so it is a generator; it must return")
        for keyword, text in shape.misfits(arguments, kwargs, optional):
            if keyword:
                yield self.source.problem((*kwargs_at, keyword), f"{name} {text}", key=True)
            else:
                yield self.source.problem(here, f"{name} {text}")

    def look_up(self, ref: str, here: KeyPath, wanted: str | None) -> Generator[Problem, None, Target | None]:
        """Yield problems, and return what `ref` names, or None if there is nothing to check. `wanted`: the kind of name
        that is required after the colon; None: the file alone is enough."""
        file, name = split_ref(ref)
        if name is None and (wanted or is_module(file)):
            yield self.source.problem(here, f"write `file.py:{wanted or 'Class'}`, got `{ref}`")
            return None
        try:
            outline = self.read(ref, Path(self.source.origin(here).source.file))
        except UserError as error:
            yield self.source.problem(here, str(error))
            return None
        except (SyntaxError, ValueError) as error:
            line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            if file not in self.broken:
                yield self.source.problem(here, f"`{file}` is not valid Python: {text}{line}")
            self.broken.add(file)
            return None
        if name is None:
            return outline, OPAQUE if outline.open else None
        target = self.follow(outline, name, Path(self.source.origin(here).source.file))
        if target is None:
            names = [n for n, d in outline.names.items() if d is not OPAQUE and not n.startswith("_")]
            yield self.source.problem(here, f"`{file}` defines no `{name}`{did_you_mean(name, names)}")
        return target

    def definition(self, ref: str, here: KeyPath) -> tuple[Path, Function] | None:
        """Return the function that `ref` names, with the file that defines it; None if that cannot be read from the
        files."""
        (_, name), base = split_ref(ref), Path(self.source.origin(here).source.file)
        try:
            target = self.follow(self.read(ref, base), name, base) if name else None
        except (UserError, SyntaxError, ValueError):
            return None
        if target is None or not isinstance(target[1], Function):
            return None
        return next(path for path, outline in self.outlines.items() if outline is target[0]), target[1]

    def read(self, ref: str, base: Path) -> Outline:
        """Return the outline of the file that `ref` names. `base`: the file in which `ref` is written."""
        path = find_source(ref, base)
        if path not in self.outlines:
            self.outlines[path] = read_outline(path)
        return self.outlines[path]

    def follow(self, outline: Outline, name: str, base: Path, hops: int = 4) -> Target | None:
        """Return the definition of `name`, also if the file imports it by name from another file that can be read; None
        if it is not defined."""
        definition = outline.find(name)
        if definition is not OPAQUE or name not in outline.imports or not hops:
            return None if definition is None else (outline, definition)
        imported = outline.imports[name]
        folder = next((path.parent for path, read in self.outlines.items() if read is outline), base)
        module = imported.partition(":")[0].split(".")[0]
        try:
            # as when it is run, a module beside the file that imports it comes first
            source = self.read(imported, folder if find_beside(folder, module) else base)
            return self.follow(source, imported.rpartition(":")[2], base, hops - 1) or (outline, OPAQUE)
        except (UserError, SyntaxError, ValueError):
            return outline, OPAQUE


def _hooks_of(outline: Outline, owner: ast.ClassDef | None) -> dict[str, Function | ast.ClassDef | Opaque | None]:
    """Return the hooks of a file or class: pre_process and post_process if it has one, else prompt and parse."""
    forms: list[dict[str, Function | ast.ClassDef | Opaque | None]] = [
        {name: outline.find(name) if owner is None else outline.method(owner, name) for name in form}
        for form in (_TOKEN_HOOKS, _HOOKS)
    ]
    return next((form for form in forms if any(hook not in (None, OPAQUE) for hook in form.values())), forms[1])


def _at(data: Any, path: KeyPath) -> Any:
    """Return the value at `path`; None if there is none."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data
