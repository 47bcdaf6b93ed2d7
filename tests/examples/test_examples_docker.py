"""The image of examples/docker, which only a machine with Docker can build."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_image_has_the_environment_of_the_script():
    lines = (ROOT / "examples" / "docker" / "Dockerfile").read_text().splitlines()
    (script,) = (line.split()[-1] for line in lines if line.startswith("RUN bash"))
    (venv,) = re.findall(r"venv=\$\{VERL_DAG_GPU_VENV:-(\S+)\}", (ROOT / script).read_text())
    folder = next(line.split()[1] for line in lines if line.startswith("WORKDIR"))
    assert lines[-1].startswith(f"ENV PATH={folder}/{venv}/bin:$PATH VIRTUAL_ENV={folder}/{venv} ")
    ignored = (ROOT / "examples" / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert {".venv*", "data", "outputs"} <= set(ignored), "they may hold gigabytes, and keys in logs"
