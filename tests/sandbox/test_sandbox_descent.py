"""The descendants of a process."""

from __future__ import annotations

import os
import subprocess

from recipe.sandbox import descent


def test_children_are_listed_with_and_without_the_kernels_list(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        listed = descent.children(os.getpid())
        monkeypatch.setattr(descent, "_LISTS_CHILDREN", False)
        assert process.pid in descent.children(os.getpid())
        assert process.pid in listed
        process.kill()
