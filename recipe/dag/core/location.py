"""The line of the user's code that an error came from, as `file:line`.

Invariant: pure; a location is relative to the current folder if the file is below it, and "" if there is none.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

USER_MODULE = "verl_dag_user_"
"""Prefix of modules that are loaded from the user's files."""

_ENGINE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = ("<", *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback, or of the engine's if there is none."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return _relative(error.filename, error.lineno or 1)
    return user_line(error) or _innermost(error, lambda frame: not frame.f_code.co_filename.startswith(_LIBRARIES))


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback. An installed package (named by `pkg.mod:function`)
    counts as the user's if no file of the user is involved."""
    by_path = _innermost(error, lambda frame: frame.f_globals.get("__name__", "").startswith(USER_MODULE))
    return by_path or _innermost(error, lambda frame: not frame.f_code.co_filename.startswith((*_LIBRARIES, _ENGINE)))


def defined_at(function: Callable[..., Any] | None) -> str:
    """Return where a function, or the constructor of a class, is defined."""
    target = function.__init__ if inspect.isclass(function) else function
    target = inspect.unwrap(getattr(target, "__func__", target)) if target is not None else None
    code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
    return _relative(code.co_filename, code.co_firstlineno) if code is not None else ""


def _innermost(error: BaseException, is_wanted: Callable[[FrameType], bool]) -> str:
    location, trace = "", error.__traceback__
    while trace is not None:
        if is_wanted(trace.tb_frame):
            location = _relative(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return location


def _relative(file: str, line: int) -> str:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
