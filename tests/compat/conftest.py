"""Fixtures of the workflow and episode tests, for files and hooks of other systems."""

from tests.episode.conftest import world  # noqa: F401
from tests.workflow.conftest import expect_one_problem, folder, load_text, problems_of  # noqa: F401
