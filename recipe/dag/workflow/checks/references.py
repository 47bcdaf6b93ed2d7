"""Checks of the files that a workflow names: they exist, define what is named, and fit how the engine calls them.

Invariant: the user's files are read, never run, so that checking is fast and has no effects.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.custom import Custom
from recipe.dag.errors import UserError
from recipe.dag.workflow.blocks import CodeInterpreterOptions
from recipe.dag.workflow.outline import (
    OPAQUE,
    Definition,
    Function,
    Opaque,
    Outline,
    Signature,
    read_outline,
    signature,
)
from recipe.dag.workflow.paths import find_beside, find_source, is_module, names_env, split_ref
from recipe.dag.workflow.pieces import parse_piece
from recipe.dag.workflow.problem import KeyPath, Problem, did_you_mean, listing
from recipe.dag.workflow.schema import Agent, EnvSpec, Node, NodeRole, ToolSpec
from recipe.dag.workflow.source import Source

BUILTIN_TOOLS = ("code_interpreter",)

_HOOKS = {"prompt": ("context",), "parse": ("context",)}
_SIIRL_HOOKS = {
    "pre_process": ("tokenizer", "prompt_ids", "obs"),
    "post_process": ("tokenizer", "prompt_ids", "response_ids"),
}
_ESTIMATOR = {"credit": ("batch",)}
_ENV = {"step": ("actions", "ground_truth")}
_TOOL = {"execute": ("arguments", "state"), "close": ()}
# An env need not have a reset; one that is there is called by name with those of the three that it takes.
_RESET = frozenset({"sample", "seed", "sandbox"})
_CONTEXT = frozenset({"context"})

Found = tuple[Outline, Definition | None]
"""A file and what is named in it; None: the file as a whole."""


class References:
    """The checks of one workflow; each file is parsed once."""

    def __init__(self, source: Source):
        self.source = source
        self.outlines: dict[Path, Outline] = {}

    def check_agent(self, agent: Agent, path: KeyPath) -> Iterator[Problem]:
        declared = self.source.data.get("tools")
        for index, tool in enumerate(agent.tools):
            at = (*path, "tools", index)
            written = _at(self.source.data, at)
            name = written.get("name") if isinstance(written, dict) else written
            if not isinstance(declared, dict) or name not in declared:
                yield from self.check_tool(tool, at, known=declared if isinstance(declared, dict) else ())
            elif isinstance(written, dict) and len(written) > 1:
                message = f"`tools.{name}` says this already; give the name alone"
                yield self.source.problem(at, message)

    def check_tool(
        self, tool: ToolSpec, at: KeyPath, *, name: str | None = None, known: Iterable[str] = ()
    ) -> Iterator[Problem]:
        """`name`: the key under `tools` that it stands at. `known`: other names that there are."""
        whole = at if name is not None or isinstance(_at(self.source.data, at), dict) else None
        here = (*at, "path") if whole and tool.path else at
        if tool.path is not None:
            found = yield from self.look_up(tool.path, here, "Class")
            if found is not None:
                yield from self.check_class(found, tool.path, here, _TOOL, tool.kwargs, (*at, "kwargs"))
            return
        called = tool.name or name or ""
        if called not in BUILTIN_TOOLS:
            names = [*BUILTIN_TOOLS, *known]
            message = f"no tool `{called}`{did_you_mean(called, names)} (your own tool: `file.py:Class`)"
            if not called:
                message = "give the tool a `name` (code_interpreter) or a `path` (`file.py:Class`)"
            yield self.source.problem((*at, "name") if whole and tool.name else at, message)
        else:
            yield from parse_piece(CodeInterpreterOptions, tool.kwargs, self.source, (*at, "kwargs"))[1]

    def check_node(self, node: Node, path: KeyPath) -> Iterator[Problem]:
        options, at = node.agent_options, (*path, "agent_options")
        if node.node_role is NodeRole.ROLLOUT:
            kwargs = (options.pre_process_kwargs, options.post_process_kwargs)
            yield from self.check_hooks(options.process_path, at, kwargs)
            for index, ref in enumerate(options.env_path):
                if not names_env(ref):
                    yield from self.check_env_class(ref, (*at, "env_path", index))
        elif node.executable_ref is not None:
            arguments = ("context",) if node.node_role is NodeRole.DEFAULT else ("episode",)
            yield from self.check_function(node.executable_ref, path, arguments, node.executable_kwargs)

    def check_estimator(self, algorithm: Algorithm) -> Iterator[Problem]:
        if not isinstance(algorithm, Custom):
            return
        here, kwargs_at = ("algorithm", "estimator"), ("algorithm", "estimator_kwargs")
        ref, kwargs = algorithm.estimator, algorithm.estimator_kwargs
        found = yield from self.look_up(ref, here, "function")
        if found is None or found[1] is OPAQUE:
            return
        if isinstance(found[1], ast.ClassDef):
            yield from self.check_class(found, ref, here, _ESTIMATOR, kwargs, kwargs_at)
            return
        shape = signature(found[1], method=False)
        yield from self.check_call(shape, ("batch",), kwargs, f"`{ref}`", here, kwargs_at, optional=frozenset())

    def check_env(self, env: EnvSpec, path: KeyPath) -> Iterator[Problem]:
        yield from self.check_env_class(env.path, (*path, "path"), env.kwargs, (*path, "kwargs"))

    def check_env_class(
        self, ref: str, at: KeyPath, kwargs: dict[str, Any] | None = None, kwargs_at: KeyPath = ()
    ) -> Iterator[Problem]:
        found = yield from self.look_up(ref, at, "Class")
        if found is None:
            return
        yield from self.check_class(found, ref, at, _ENV, kwargs, kwargs_at)
        outline, owner = found
        reset = outline.method(owner, "reset") if isinstance(owner, ast.ClassDef) else None
        if reset is not None:
            shape = signature(reset, method=True)
            yield from self.check_call(shape, (), {}, f"reset of `{ref}`", at, at, _RESET)

    def check_hooks(
        self, ref: str | None, at: KeyPath, kwargs: tuple[dict[str, Any], dict[str, Any]]
    ) -> Iterator[Problem]:
        """`kwargs`: of the function that makes the prompt, and of the one that reads the answer."""
        keys = ("pre_process_kwargs", "post_process_kwargs")
        if ref is None:
            for key in (key for key, given in zip(keys, kwargs, strict=True) if given):
                yield self.source.problem((*at, key), "nobody reads this without `hooks`", key=True)
            return
        here = (*at, "process_path")
        found = yield from self.look_up(ref, here, None)
        if found is None or found[1] is OPAQUE:
            return
        outline, owner = found
        if owner is not None and not isinstance(owner, ast.ClassDef):
            message = f"`{ref}` is a function; name the file, or a class with prompt or parse"
            yield self.source.problem(here, message)
            return
        if isinstance(owner, ast.ClassDef):
            yield from self.check_constructor(outline, owner, ref, here)
        forms = [
            {name: outline.find(name) if owner is None else outline.method(owner, name) for name in form}
            for form in (_SIIRL_HOOKS, _HOOKS)
        ]
        hooks = next((form for form in forms if any(hook not in (None, OPAQUE) for hook in form.values())), forms[1])
        if not any(hooks.values()):
            yield self.source.problem(here, f"`{ref}` defines neither prompt nor parse")
            return
        arguments = _HOOKS | _SIIRL_HOOKS
        for (name, hook), key, given in zip(hooks.items(), keys, kwargs, strict=True):
            if hook is None:
                if given:
                    message = f"`{ref}` has no {name} that could take this"
                    yield self.source.problem((*at, key), message, key=True)
                continue
            shape = signature(hook, method=owner is not None) if not isinstance(hook, ast.ClassDef) else OPAQUE
            optional = frozenset[str]() if name in _HOOKS else _CONTEXT
            yield from self.check_call(shape, arguments[name], given, f"{name} of `{ref}`", here, (*at, key), optional)

    def check_function(
        self, ref: str, path: KeyPath, arguments: tuple[str, ...], kwargs: dict[str, Any]
    ) -> Iterator[Problem]:
        here = (*path, "executable_ref")
        found = yield from self.look_up(ref, here, "function")
        if found is None or found[1] is OPAQUE:
            return
        _, function = found
        if isinstance(function, ast.ClassDef):
            yield self.source.problem(here, f"`{ref}` is a class; name a function")
            return
        shape = signature(function, method=False)
        kwargs_at = (*path, "executable_kwargs")
        yield from self.check_call(shape, arguments, kwargs, f"`{ref}`", here, kwargs_at, optional=frozenset())

    def check_class(
        self,
        found: Found,
        ref: str,
        here: KeyPath,
        methods: dict[str, tuple[str, ...]],
        kwargs: dict[str, Any] | None = None,
        kwargs_at: KeyPath = (),
    ) -> Iterator[Problem]:
        """`kwargs`: what its constructor is given."""
        outline, owner = found
        if owner is OPAQUE:
            return
        if not isinstance(owner, ast.ClassDef):
            yield self.source.problem(here, f"`{ref}` is a function; name a class with {listing(methods)}")
            return
        yield from self.check_constructor(outline, owner, ref, here, kwargs or {}, kwargs_at)
        if missing := [name for name in methods if outline.method(owner, name) is None]:
            yield self.source.problem(here, f"`{ref}` has no method {listing(missing)}; it needs {listing(methods)}")
        for name, arguments in methods.items():
            method = outline.method(owner, name)
            if method is None:
                continue
            if methods is _TOOL and isinstance(method, ast.FunctionDef) and not method.decorator_list:
                yield self.source.problem(here, f"{name} of `{ref}` must be `async def`")
                continue
            shape, by_name = signature(method, method=True), frozenset[str]()
            if methods is _ENV and isinstance(shape, Signature) and not any(shape.misfits((), arguments, frozenset())):
                arguments, by_name = (), frozenset(arguments)  # in whatever order
            yield from self.check_call(shape, arguments, {}, f"{name} of `{ref}`", here, here, by_name or _CONTEXT)

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

    def look_up(self, ref: str, here: KeyPath, wanted: str | None) -> Generator[Problem, None, Found | None]:
        """Yields problems and returns what `ref` names, or None where there is nothing to check. `wanted`: what must be
        named after the colon; None: the file alone will do."""
        place, name = split_ref(ref)
        if name is None and (wanted or is_module(place)):
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
            yield self.source.problem(here, f"`{place}` is not valid Python: {text}{line}")
            return None
        if name is None:
            return outline, OPAQUE if outline.open else None
        found = self.follow(outline, name, Path(self.source.origin(here).source.file))
        if found is None:
            names = [n for n, d in outline.names.items() if d is not OPAQUE and not n.startswith("_")]
            yield self.source.problem(here, f"`{place}` defines no `{name}`{did_you_mean(name, names)}")
        return found

    def definition(self, ref: str, here: KeyPath) -> str | None:
        """`folder/file.py:function` of the function that `ref` names, where it is defined; None where the files do not
        say."""
        (_, name), base = split_ref(ref), Path(self.source.origin(here).source.file)
        try:
            found = self.follow(self.read(ref, base), name, base) if name else None
        except (UserError, SyntaxError, ValueError):
            return None
        if found is None or not isinstance(found[1], Function):
            return None
        path = next(path for path, outline in self.outlines.items() if outline is found[0])
        return f"{path.as_posix()}:{found[1].name}"

    def read(self, ref: str, base: Path) -> Outline:
        """`base`: the file that names it."""
        path = find_source(ref, base)
        if path not in self.outlines:
            self.outlines[path] = read_outline(path)
        return self.outlines[path]

    def follow(self, outline: Outline, name: str, base: Path, hops: int = 4) -> Found | None:
        """The definition, also where the file imports it by name from another one that can be read."""
        found = outline.find(name)
        if found is not OPAQUE or name not in outline.imports or not hops:
            return None if found is None else (outline, found)
        target = outline.imports[name]
        folder = next((path.parent for path, known in self.outlines.items() if known is outline), base)
        try:
            # beside the file that imports it, as when it is run
            read = self.read(target, folder if find_beside(folder, target.partition(":")[0].split(".")[0]) else base)
            return self.follow(read, target.rpartition(":")[2], base, hops - 1) or (outline, OPAQUE)
        except (UserError, SyntaxError, ValueError):
            return outline, OPAQUE


def _at(data: Any, path: KeyPath) -> Any:
    """What the file says there; None where it says nothing."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data
