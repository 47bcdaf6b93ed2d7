"""Scripts that train, up to where they would start Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class TrainingScript:
    """A script with a `.model` and a `.data` that it accepts, a stub `nvidia-smi`, and a stub `python`, which prints
    its arguments one per line and runs `more`."""

    def __init__(self, script: Path, folder: Path, *, more: str = "", data: str = "it's data", test: str = "test"):
        self.script, self.stubs, self.out = script, folder / "bin", folder / "out"
        self.model, self.data = folder / "model", folder / data
        for path in (self.stubs, self.model, self.data):
            path.mkdir()
        self.stub("python", f"printf '%s\\n' \"$@\"\n{more}")
        (self.model / "config.json").write_text("{}")
        for part in ("train", test):
            (self.data / f"{part}.parquet").touch()

    def stub(self, name: str, text: str) -> None:
        (self.stubs / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.stubs / name).chmod(0o755)

    def run(
        self, *arguments: object, gpu: bool = True, cwd: Path = ROOT, **env: str
    ) -> subprocess.CompletedProcess[str]:
        self.stub("nvidia-smi", "echo 'GPU 0: one'" if gpu else "exit 9")
        env = {"PATH": f"{self.stubs}:/usr/bin:/bin", "PYTHON": str(self.stubs / "python"), **env}
        command = ["bash", str(self.script), *map(str, arguments)]
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)

    def expect_refusal(self, reason: str, *arguments: object, **options) -> str:
        """One line that says `reason`."""
        done = self.run(*arguments, **options)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and reason in done.stderr
        return done.stderr
