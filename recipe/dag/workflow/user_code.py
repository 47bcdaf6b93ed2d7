"""Loading what a workflow names: `file.py:Name`, `file.py`, or `pkg.mod:Name`.

Invariant: a file runs once per process, whoever asks and however the path is written, so all its objects share one
module. The module's name depends on the file's path alone: what it defines can be pickled between processes that
loaded it. A file imports what lies beside it as a script does, and no other file sees that: two folders may each have a
`helper.py`.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.location import USER_MODULE, raised_at
from recipe.dag.workflow.paths import find_beside, is_module, resolve_path, split_ref
from recipe.dag.workflow.problem import did_you_mean

# Reentrant: a file may load another one while it runs.
_lock = threading.RLock()


def load_object(ref: str, base: str | Path) -> Any:
    """The object, or the module where `ref` names none. `base`: the workflow file or its folder. Raises UserError."""
    place, name = split_ref(ref)
    try:
        module = importlib.import_module(place) if is_module(place) else _run_file(resolve_path(place, base))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        how = "imported" if is_module(place) else "loaded"
        raise UserError(f"{place}: cannot be {how}: {_one_line(error)}") from error
    found: Any = module
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            raise UserError(f"{place}: there is no `{name}` in it{did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def load_function(ref: str, base: str | Path, node_id: str) -> Callable[..., Any]:
    """What `executable_ref` of a node names. Raises UserError."""
    function = load_object(ref, base)
    if not callable(function):
        raise UserError(f"node {node_id}: {ref} is no function; write it as file.py:function")
    return function


def module_name(path: Path) -> str:
    """Of a file, or of a package's folder."""
    return f"{USER_MODULE}{hashlib.sha1(str(path).encode()).hexdigest()[:12]}_{path.stem}"


def _run_file(path: Path) -> ModuleType:
    """Run a file, or the `__init__.py` of a folder, unless that has been done. Raises whatever it raises."""
    name = module_name(path)
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        module = importlib.util.module_from_spec(_spec_of(name, path))
        # Before it runs: dataclasses and pickle look their module up by name.
        sys.modules[name] = module
        try:
            if module.__spec__.loader is not None:
                module.__spec__.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _spec_of(name: str, path: Path) -> ModuleSpec:
    if path.is_file():
        return importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path), path.parent))
    init = path / "__init__.py"
    loader = _Loader(name, str(init), path.parent) if init.is_file() else None
    spec = ModuleSpec(name, loader, origin=str(init) if loader else None, is_package=True)
    spec.has_location = loader is not None
    spec.submodule_search_locations = [str(path)]
    return spec


class _Loader(SourceFileLoader):
    """Runs a file in which `import` sees `folder` first."""

    def __init__(self, name: str, path: str, folder: Path):
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        # A module's own __import__ holds for its import statements alone, also for those that its functions run later;
        # sys.path and sys.modules are the whole process's.
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import_beside, self._folder)}
        super().exec_module(module)


def _import_beside(
    folder: Path,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """What an import statement calls, with `folder` to look in first."""
    top, dot, rest = name.partition(".")
    path = find_beside(folder, top) if level == 0 else None
    if path is not None and (module_name(path) in sys.modules or not _is_ordinary(top, path)):
        name = _run_file(path).__name__ + dot + rest
    return builtins.__import__(name, globals, locals, fromlist, level)


def _is_ordinary(top: str, path: Path) -> bool:
    """Whether `import top` leads to `path` for everyone: then there must be no second copy of it. A folder without
    __init__.py comes after everything that can be imported (this project's own `recipe` is one)."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or path.is_dir() and not (path / "__init__.py").is_file():
        return spec is not None
    return spec.origin is not None and Path(spec.origin).resolve() in (path, path / "__init__.py")


class _Submodules:
    """Finds the modules of a package that lies beside a user's file; they see what the file sees."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if path is None or not top.startswith(USER_MODULE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            folder = Path(next(iter(sys.modules[top].__path__))).parent
            spec.loader = _Loader(name, spec.origin, folder)
        return spec


sys.meta_path.insert(0, _Submodules)


def _one_line(error: BaseException) -> str:
    text = " ".join((f"{type(error).__name__}: {error}" if str(error) else type(error).__name__).split())
    line = raised_at(error)
    return f"{text} ({line})" if line else text
