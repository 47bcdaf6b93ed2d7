"""Loading what a workflow names: `file.py:Name`, `file.py`, or `pkg.mod:Name`.

Invariant: a file runs once per process, whoever asks and however the path is written, so all its objects share one
module. The module's name depends on the file's path alone: what it defines can be pickled between processes that
loaded it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from recipe.dag.errors import UserError
from recipe.dag.workflow.paths import is_module, resolve_path, split_ref
from recipe.dag.workflow.problem import did_you_mean

# Reentrant: a file may load another one while it runs.
_lock = threading.RLock()


def load_object(ref: str, base: str | Path) -> Any:
    """The object, or the module where `ref` names none. `base`: the workflow file or its folder. Raises UserError."""
    place, name = split_ref(ref)
    with _lock:
        module = _import(place) if is_module(place) else _run_file(resolve_path(place, base), place)
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
    return f"verl_dag_user_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}_{path.stem}"


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{name}: cannot be imported: {_one_line(error)}") from error


def _run_file(path: Path, shown: str) -> ModuleType:
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{shown}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{shown}: cannot be loaded: {_one_line(error)}") from error
    return module


def _one_line(error: BaseException) -> str:
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split()) + (f" (line {line})" if line and "line" not in text else "")
