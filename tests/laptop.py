"""A copy of a recipe's script beside programs that only write down what they are asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Laptop:
    def __init__(self, folder: Path, script: str, programs: Mapping[str, str]):
        """`programs`: their texts by name. They write a line per call to $LOG, with tabs between its words, and their
        process numbers to $PIDS if they serve."""
        self.root, self.log, self.pids = folder / "project", folder / "log", folder / "pids"
        self.script, self.bin = self.root / script, folder / "venv" / "bin"
        for part in (script, "recipe/dag/scripts", "pyproject.toml"):
            source, target = ROOT / part, self.root / part
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        self.bin.mkdir(parents=True)
        for name, text in programs.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def command(self, *arguments: str, **env: str) -> dict[str, Any]:
        """Return the arguments of a process that runs the script."""
        paths = {"LOG": str(self.log), "PIDS": str(self.pids), "PYTHON": sys.executable}
        env = {"PATH": "/usr/bin:/bin", "VERL_DAG_VENV": str(self.bin.parent), **paths, **env}
        return {"args": ["bash", str(self.script), *arguments], "env": env, "text": True}

    def run(self, *arguments: str, **env: str) -> tuple[int, list[list[str]], str]:
        """Return the exit code, the commands without those of pip, and stderr."""
        self.log.unlink(missing_ok=True)
        done = subprocess.run(**self.command(*arguments, **env), capture_output=True, timeout=60)
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        calls = [line.rstrip("\t").split("\t") for line in lines]
        return done.returncode, [call for call in calls if "pip" not in call], done.stderr

    def servers_left(self) -> list[int]:
        pids = self.pids.read_text().split() if self.pids.exists() else []
        return [int(pid) for pid in pids if Path(f"/proc/{pid}").exists()]


def option(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]
