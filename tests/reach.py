"""The test files that a change reaches: `python tests/reach.py [REVISION]` prints them, a line each.

A module reaches the modules that import it when they are loaded, and the tests that import it anywhere; any file
reaches the tests that name it by path or file name. A conftest.py stands for its folder. A test that only starts the
changed code as a program is not found: that is what the whole suite is for.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ_ALL = {"tests/test_docs.py", "tests/test_layers.py", "tests/test_shipped.py"}
"""Tests that look for the files that they read."""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def module_of(path: str) -> str:
    """Return the module's name, for envs/ and preprocess/ that of the links in verl_dag/."""
    path = f"verl_dag/{path}" if path.startswith(("envs/", "preprocess/")) else path
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports(path: str) -> list[str]:
    """Return the modules that a file imports, and the names that may be modules: a test's anywhere, others' at load."""
    tree, found = ast.parse((ROOT / path).read_text()), []
    for node in ast.walk(tree) if path.startswith("tests/") else tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def reached(changed: Iterable[str]) -> list[str]:
    """Return the test files that the changed files reach."""
    python = git("ls-files", "*.py", "--cached", "--others", "--exclude-standard")
    importers: dict[str, list[str]] = defaultdict(list)
    for path in python:
        if path != "tests/conftest.py":  # it would connect everything with everything
            for module in imports(path):
                importers[module].append(path)
    texts = {path: (ROOT / path).read_text() for path in python if is_test(path)}
    todo, seen = list(changed), set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith("conftest.py"):
            todo += [test for test in texts if test.startswith(path.removesuffix("conftest.py"))]
        elif path.endswith(".py"):
            todo += importers[module_of(path)]
        name = Path(path).name
        common = name in ("__init__.py", "conftest.py", "README.md", "tiny_cpu.yaml")
        todo += [test for test, text in texts.items() if (path if common else name) in text]
    return sorted({path for path in seen if is_test(path)} | (READ_ALL if seen else set()))


if __name__ == "__main__":
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    print("\n".join(reached(git("diff", "--name-only", revision) + git("ls-files", "--others", "--exclude-standard"))))
