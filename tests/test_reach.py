"""Which tests a change reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reach import READ_ALL, reached


@pytest.fixture(scope="module")
def reach():
    return lambda *changed: set(reached(changed)) - READ_ALL


def test_a_module_reaches_its_importers_and_their_tests_but_no_others(reach):
    tests = reach("recipe/dag/credit/vote.py")
    assert {"tests/credit/test_credit_vote.py", "tests/reward/test_reward_group.py"} <= tests  # group.py imports it
    assert not {"tests/tiny/test_tiny_build.py", "tests/sandbox/test_sandbox_routes.py"} & tests


def test_a_file_without_imports_reaches_the_tests_that_name_it(reach):
    tests = reach("workflows/workflow_cory.yaml")
    assert "tests/end_to_end/test_end_to_end_algorithms.py" in tests and "tests/types/test_types_row.py" not in tests


def test_a_conftest_reaches_its_folder_and_nothing_reaches_nothing(reach):
    tests = reach("tests/coach/conftest.py")
    assert {f"tests/coach/{path.name}" for path in Path(__file__).with_name("coach").glob("test_*.py")} <= tests
    assert not any(name.startswith("tests/credit/") for name in tests)
    assert reached([]) == []
