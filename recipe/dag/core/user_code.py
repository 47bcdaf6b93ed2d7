"""Loads the code that a workflow names: `file.py:Name`, `file.py`, or `pkg.mod:Name`.

Invariant: a file runs once per process, however its path is written, so all its objects share one module. The module's
name depends on the file's path alone, so what it defines can be pickled between processes that loaded it. A file
imports the modules in its folder as a script does, without affecting other files: two folders may each have a
`helper.py`.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.location import USER_MODULE, raised_at
from recipe.dag.core.paths import find_beside, is_module, resolve_path, split_ref
from recipe.dag.core.suggestion import did_you_mean

# Reentrant: a file may load another one while it runs.
_lock = threading.RLock()


def load_object(ref: str, base: str | Path) -> Any:
    """Return the object, or the module if `ref` names none. `base`: the workflow file or its folder. Raises
    UserError."""
    path, name = split_ref(ref)
    try:
        module = importlib.import_module(path) if is_module(path) else _run_file(resolve_path(path, base))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        verb = "imported" if is_module(path) else "loaded"
        raise UserError(f"{path}: cannot be {verb}: {_one_line(error)}") from error
    target: Any = module
    for part in name.split(".") if name else ():
        if not hasattr(target, part):
            names = [n for n in vars(target) if not n.startswith("_")] if hasattr(target, "__dict__") else []
            raise UserError(f"{path}: defines no `{name}`{did_you_mean(part, names)}")
        target = getattr(target, part)
    return target


def module_name(path: Path) -> str:
    """Return the module name for a file or a package's folder."""
    return f"{USER_MODULE}{hashlib.sha1(str(path).encode()).hexdigest()[:12]}_{path.stem}"


def _run_file(path: Path) -> ModuleType:
    """Run a file, or the `__init__.py` of a folder, if it has not run yet. Raises any exception of that code."""
    name = module_name(path)
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        spec = _spec_of(name, path)
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs: dataclasses and pickle look up their module by name.
        sys.modules[name] = module
        try:
            if spec.loader is not None:
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _spec_of(name: str, path: Path) -> ModuleSpec:
    if path.is_file():
        spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path), path.parent))
        assert spec is not None  # it is None only if no loader is given or known
        return spec
    init = path / "__init__.py"
    loader = _Loader(name, str(init), path.parent) if init.is_file() else None
    spec = ModuleSpec(name, loader, origin=str(init) if loader else None, is_package=True)
    spec.has_location = loader is not None
    spec.submodule_search_locations = [str(path)]
    return spec


class _Loader(SourceFileLoader):
    """Runs a file whose `import` statements search `folder` first."""

    def __init__(self, name: str, path: str, folder: Path):
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        # A module's own __import__ affects only its import statements, including those that its functions run later;
        # sys.path and sys.modules would affect the whole process.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import_beside, self._folder)}
        super().exec_module(module)


def _import_beside(folder: Path, name: str, *args: Any, **kwargs: Any) -> ModuleType:
    """Replace `__import__` in a user's file: search `folder` first."""
    level = kwargs.get("level", args[3] if len(args) > 3 else 0)  # after globals, locals and fromlist
    top, dot, rest = name.partition(".")
    path = find_beside(folder, top) if level == 0 else None
    if path is not None and (module_name(path) in sys.modules or not _is_ordinary(top, path)):
        name = _run_file(path).__name__ + dot + rest
    return builtins.__import__(name, *args, **kwargs)


def _is_ordinary(top: str, path: Path) -> bool:
    """Return whether a plain `import top` finds `path`, or something that takes precedence over it, so that it must not
    be loaded a second time. A folder without __init__.py ranks after everything else that can be imported (this
    project's own `recipe` is one)."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or path.is_dir() and not (path / "__init__.py").is_file():
        return spec is not None
    return spec.origin is not None and Path(spec.origin).resolve() in (path, path / "__init__.py")


class _Submodules:
    """Finds the modules of a package in a user's folder; their imports search that folder first, too."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if path is None or not top.startswith(USER_MODULE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            folder = Path(next(iter(sys.modules[top].__path__))).parent
            spec.loader = _Loader(name, spec.loader.path, folder)
        return spec


sys.meta_path.insert(0, _Submodules)


def _one_line(error: BaseException) -> str:
    text = " ".join((f"{type(error).__name__}: {error}" if str(error) else type(error).__name__).split())
    line = raised_at(error)
    return f"{text} ({line})" if line else text
