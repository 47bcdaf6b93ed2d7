"""The limit on open files is raised."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 700))
from recipe.sandbox.open_files import raise_limit
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_it_may_be(env):
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "700 (700, 700)\n"
