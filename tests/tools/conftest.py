"""No test waits before a request is repeated."""

from __future__ import annotations

import pytest

from recipe.dag.tools import sandbox_transport, web


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(sandbox_transport, "_MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(web, "MAX_WAIT_S", 0.0)
