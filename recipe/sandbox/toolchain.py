"""Interpreters, the compiler, and their environment variables.

Invariant: they are the same for every engine; only LD_LIBRARY_PATH and TZ come from the server's environment.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from recipe.sandbox.outcome import SandboxError

COMPILER_MEMORY_MB = 4096
_PASSED_ON = ("LD_LIBRARY_PATH", "TZ")


def interpreter(language: str, source: str, args: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a python, pytest or bash program. Raises SandboxError if what it needs is not
    installed."""
    if language == "pytest":
        if find_spec("pytest") is None:
            raise SandboxError(f"pytest is not installed in the environment that runs the sandbox, {sys.prefix}")
        return [sys.executable, "-m", "pytest", source, *args]
    if language == "python":
        return [sys.executable, "-u", source]
    return [_installed("bash"), "--noprofile", "--norc", source]


def compiler(source: str, binary: str) -> list[str]:
    """Return the command that compiles C++. Raises SandboxError if g++ is not installed."""
    return [_installed("g++"), "-std=c++17", "-O1", "-o", binary, source]


def environment(home: str) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin")),
        "HOME": home,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        # Each BLAS thread reserves address space, jobs share the cores, and threads do not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }


def _installed(program: str) -> str:
    """Return the path of a program. Raises SandboxError if it is not installed."""
    path = shutil.which(program)
    if path is None:
        raise SandboxError(f"{program} is not installed on the machine that runs the sandbox")
    return path
