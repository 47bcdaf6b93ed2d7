"""Checks of the files that a workflow names: they exist, define what is named, and match the engine's calls.

Invariant: the user's files are read, never run, so that checking is fast and has no side effects.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterator, Mapping, Sequence
from inspect import Parameter
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import find_beside, find_source, is_module, names_env, split_ref
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean, listing
from recipe.dag.types.convention import CONSTRUCTOR, ENV, REWARD, SCRIPT, Convention, Reference, form_of
from recipe.dag.workflow.ast_index import (
    OPAQUE,
    Definition,
    Function,
    Opaque,
    Outline,
    is_generator,
    parameters,
    read_outline,
    short_returns,
)
from recipe.dag.workflow.node import KINDS, Kind, Node
from recipe.dag.workflow.schema import EnvSpec
from recipe.dag.workflow.source import Source, value_at

Target = tuple[Outline, Definition | None]
"""A file and the definition that is named in it; None: the whole file."""


class References:
    """The checks of one workflow; each file is parsed once."""

    def __init__(self, source: Source):
        self.source = source
        self.outlines: dict[Path, Outline] = {}
        self.broken: set[str] = set()
        """Files that have been reported as not valid Python."""

    def check_node(self, node: Node, path: KeyPath) -> Iterator[Problem]:
        if node.kind is Kind.ROLLOUT:
            yield from self._check_hooks(node, path)
            for index, ref in enumerate(node.env):
                if not names_env(ref):
                    yield from self.check_class(Reference(ref, (*path, "env", index)), ENV)
        elif node.function is not None and (convention := KINDS[node.kind].convention) is not None:
            convention = REWARD.get(node.scope, convention) if node.kind is Kind.REWARD else convention
            reference = Reference(node.function, (*path, KINDS[node.kind].key), node.args, (*path, "args"))
            yield from self.check_function(reference, convention)
            if node.kind is Kind.REWARD and value_at(self.source.data, (*path, "scope")) in (None, *REWARD):
                yield from self._check_scope(node, reference)

    def _check_scope(self, node: Node, reference: Reference) -> Iterator[Problem]:
        """Check that the name of a reward function's first argument does not contradict the node's scope."""
        _, function = self.definition(reference.ref, reference.at) or (None, None)
        arguments = [] if function is None else [*function.args.posonlyargs, *function.args.args]
        first = next((argument.arg for argument in arguments), None)
        own = {scope: convention.arguments[0] for scope, convention in REWARD.items()}
        other = next((scope for scope, name in own.items() if scope != node.scope and first == name), None)
        if other is not None:
            message = f"`{reference.ref}` takes `{first}`, so write `scope: {other}`"
            yield self.source.problem(reference.at, f"{message}, or rename the argument to `{own[node.scope]}`")

    def check_env(self, env: EnvSpec, path: KeyPath) -> Iterator[Problem]:
        yield from self.check_class(Reference(env.path, (*path, "path"), env.kwargs, (*path, "kwargs")), ENV)

    def check_script(self, script: str, path: KeyPath) -> Iterator[Problem]:
        yield from self.check_function(Reference(script, path), SCRIPT)

    def _check_hooks(self, node: Node, at: KeyPath) -> Iterator[Problem]:
        """Check the hooks of a node: the one that makes the prompt, and the one that parses."""
        ref, here = node.hooks, (*at, "hooks")
        kwargs = {"prompt_options": node.prompt_options, "parse_options": node.parse_options}
        if ref is None:
            for key in (key for key, values in kwargs.items() if values):
                yield self.source.problem((*at, key), "has no effect without `hooks`; remove it", key=True)
            return
        outline, owner = (yield from self.look_up(ref, here, None)) or (None, OPAQUE)
        if outline is None or owner is OPAQUE:
            return
        if isinstance(owner, Function):
            message = f"`{ref}` is a function; name the file, or a class with prompt or parse"
            yield self.source.problem(here, message)
            return
        if owner is not None:
            yield from self.check_constructor(outline, owner, Reference(ref, here))
        calls = [Reference(ref, here, values, (*at, key)) for key, values in kwargs.items()]
        yield from self._check_both_hooks(outline, owner, calls)

    def _check_both_hooks(
        self, outline: Outline, owner: ast.ClassDef | None, calls: Sequence[Reference]
    ) -> Iterator[Problem]:
        """Check the hooks of a class, or of a whole file. `calls`: of the hook for the prompt, and of the other one."""

        def find(name: str) -> Definition | None:
            return outline.find(name) if owner is None else outline.method(owner, name)

        form = form_of(lambda name: find(name) not in (None, OPAQUE))
        if not any(map(find, form)):
            yield self.source.problem(calls[0].at, f"`{calls[0].ref}` defines neither prompt nor parse")
            return
        fields = None if owner is None else outline.options(owner)
        for name, call in zip(form, calls, strict=True):
            hook = find(name)
            if name == "prompt" and fields is not None:
                yield from self._misfits(fields, CONSTRUCTOR, f"`{call.ref}.Options`", call)
                call = Reference(call.ref, call.at)
            if hook is None and call.options:
                message = f"`{call.ref}` defines no {name} that could take this; remove it"
                yield self.source.problem(call.options_at, message, key=True)
            elif isinstance(hook, Function):
                yield from self._check_call(hook, form[name], f"{name} of `{call.ref}`", call, method=owner is not None)

    def check_function(
        self, reference: Reference, convention: Convention, or_class: Mapping[str, Convention] | None = None
    ) -> Iterator[Problem]:
        """See `Facts.check_function`."""
        target = yield from self.look_up(reference.ref, reference.at, "function")
        if target is None:
            return
        outline, code = target
        if isinstance(code, ast.ClassDef) and or_class is not None:
            yield from self._check_methods(outline, code, reference, or_class)
        elif isinstance(code, ast.ClassDef):
            yield self.source.problem(reference.at, f"`{reference.ref}` is a class; name a function")
        elif isinstance(code, Function):
            yield from self._check_call(code, convention, f"`{reference.ref}`", reference)

    def check_class(self, reference: Reference, methods: Mapping[str, Convention]) -> Iterator[Problem]:
        """Check a class that is built with the options of `reference` and has these methods."""
        target = yield from self.look_up(reference.ref, reference.at, "Class")
        if target is None or target[1] is OPAQUE:
            return
        outline, owner = target
        if isinstance(owner, ast.ClassDef):
            yield from self._check_methods(outline, owner, reference, methods)
        else:
            message = f"`{reference.ref}` is a function; name a class with {listing(_required(methods))}"
            yield self.source.problem(reference.at, message)

    def _check_methods(
        self, outline: Outline, owner: ast.ClassDef, reference: Reference, methods: Mapping[str, Convention]
    ) -> Iterator[Problem]:
        yield from self.check_constructor(outline, owner, reference)
        ref, here, needed = reference.ref, reference.at, _required(methods)
        if missing := [name for name in needed if outline.method(owner, name) is None]:
            yield self.source.problem(here, f"`{ref}` has no method {listing(missing)}; it needs {listing(needed)}")
        for name, convention in methods.items():
            method = outline.method(owner, name)
            if not isinstance(method, Function):
                continue
            if convention.coroutine and isinstance(method, ast.FunctionDef) and not method.decorator_list:
                yield self.source.problem(here, f"{name} of `{ref}` must be `async def`")
                continue
            for line, count in short_returns(method) if methods is ENV and name == "step" else ():
                problem = f"step of `{ref}` returns {count} values in line {line}"
                yield self.source.problem(here, f"{problem}, not (obs, reward, done) or (obs, reward, done, info)")
            call = Reference(ref, here)  # the options are the constructor's
            yield from self._check_call(method, convention, f"{name} of `{ref}`", call, method=True)

    def check_constructor(self, outline: Outline, owner: ast.ClassDef, reference: Reference) -> Iterator[Problem]:
        how = "with `kwargs` alone" if reference.options else "without arguments"
        init = outline.method(owner, "__init__")
        name = f"`{reference.ref}` is built {how}, but __init__"
        if init is not None:
            yield from self._check_call(init, CONSTRUCTOR, name, reference, method=True)
        elif not outline.decorated(owner):
            yield from self._misfits((), CONSTRUCTOR, name, reference)

    def _check_call(
        self, function: Function | Opaque, convention: Convention, name: str, call: Reference, *, method: bool = False
    ) -> Iterator[Problem]:
        """Check a call with the options of `call`. `name`: of the function in messages. `method`: it takes self."""
        shape = parameters(function, method=method)
        if isinstance(function, Opaque) or isinstance(shape, Opaque):
            return
        if is_generator(function):
            yield self.source.problem(call.at, f"{name} yields, so it is a generator; it must return")
        yield from self._misfits(shape, convention, name, call)

    def _misfits(
        self, shape: tuple[Parameter, ...], convention: Convention, name: str, call: Reference
    ) -> Iterator[Problem]:
        for option, message in convention.misfits(shape, call.options):
            at = (*call.options_at, option) if option else call.at
            yield self.source.problem(at, f"{name} {message}", key=bool(option))

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


def _required(methods: Mapping[str, Convention]) -> list[str]:
    return [name for name, convention in methods.items() if convention.required]
