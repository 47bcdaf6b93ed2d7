"""Triton's kernels on machines without a GPU. Fixtures, since a test module that is run as a script has no `tests`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """Runs a test module as a script in which Triton interprets its kernels; skips where it is not installed."""
    pytest.importorskip("triton")

    def run(script: str) -> None:
        env = os.environ | {"TRITON_INTERPRET": "1"}  # which Triton reads when it is imported
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture
def replace_kernels(monkeypatch) -> Callable[..., None]:
    """Replaces a module of kernels, which imports Triton, by functions."""

    def replace(module: str, **functions: Callable) -> None:
        replaced = SimpleNamespace(**functions)
        monkeypatch.setattr(module, replaced, raising=False)
        monkeypatch.setitem(sys.modules, module, replaced)

    return replace
