from __future__ import annotations

from collections.abc import Callable

import pytest

from recipe.dag.types.row import Row
from tests.rows import build_row, merge_rows


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    return build_row


@pytest.fixture(scope="session")
def merge() -> Callable[[list[Row]], Row]:
    return merge_rows


@pytest.fixture(autouse=True)
def _alone(one_thread):
    """Run every test here with one thread."""
