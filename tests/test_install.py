"""What the lock file of the GPU installation pins, against pyproject.toml, verl's requirements and the README."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipe.dag.app import doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DSBENCH = PROJECT["optional-dependencies"]["dsbench"]
LOCK = (ROOT / "requirements-gpu.lock").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK, re.MULTILINE))
GPU = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "platform_machine": "x86_64"}
OVERRIDDEN = {Requirement(line).name for line in (ROOT / "uv-overrides.txt").read_text().split()}


def unmet(requirements: list[str], *, without: set[str] = frozenset()) -> list[str]:
    """The requirements of a GPU host that no pin satisfies."""
    wanted = [Requirement(text) for text in requirements]
    wanted = [item for item in wanted if item.marker is None or item.marker.evaluate({**GPU, "extra": ""})]
    pins = {item: PINS.get(canonicalize_name(item.name)) for item in wanted if item.name not in without}
    return [
        str(item) for item, pin in pins.items() if pin is None or not item.specifier.contains(pin, prereleases=True)
    ]


def test_the_lock_satisfies_pyproject():
    assert unmet([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"], *DSBENCH]) == []


@pytest.mark.parametrize("package", ["verl", "ray", "tensordict"])
def test_the_lock_satisfies_what_its_packages_require(package):
    """Except for what uv-overrides.txt overrides."""
    assert metadata.version(package) == PINS[package]
    assert unmet(metadata.requires(package), without=OVERRIDDEN) == []


def test_the_overrides_are_the_gpu_extra_s():
    overrides = (ROOT / "uv-overrides.txt").read_text().split()
    assert overrides and set(overrides) <= set(PROJECT["optional-dependencies"]["gpu"])


def test_every_line_of_the_lock_is_a_pin_or_says_why():
    lines = [line for line in LOCK.splitlines() if not line.lstrip().startswith("#")]
    assert len(PINS) == len(lines) > 100
    assert "://" not in LOCK and "index" not in LOCK.splitlines()[1]


def test_the_lock_is_for_the_host_that_doctor_and_the_readme_ask_for():
    command = LOCK.splitlines()[1]
    python, glibc = ".".join(map(str, doctor.GPU_PYTHON)), doctor.GPU_GLIBC
    assert (
        f"--python-version {python} " in command
        and f"--python-platform x86_64-manylinux_{glibc[0]}_{glibc[1]} " in command
    )
    section = (ROOT / "docs" / "running.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    for need in (f"glibc {glibc[0]}.{glibc[1]}", f"Python {python}", f"driver {doctor.GPU_DRIVER}", "CUDA 13"):
        assert need in " ".join(section.split())
    assert PINS["nvidia-cuda-runtime"].startswith("13.")


def test_the_torch_of_the_lock_is_the_cuda_build():
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "triton"} <= PINS.keys()


def test_doctor_looks_for_the_modules_of_the_extra_dsbench(monkeypatch):
    """xgboost-cpu has the module of xgboost, and scikit-learn is sklearn."""
    names = {"scikit-learn": "sklearn", "xgboost-cpu": "xgboost"}
    assert sorted(names.get(Requirement(text).name, Requirement(text).name) for text in DSBENCH) == [
        *doctor.DATA_SCIENCE
    ]
    monkeypatch.setattr(doctor, "DATA_SCIENCE", ("json", "no_such_module"))
    with pytest.raises(
        doctor.Note, match=r"has no no_such_module, which .*; pip install -e '.\[dsbench\]', or set sandbox"
    ):
        doctor.check_dsbench()
    monkeypatch.setattr(doctor, "DATA_SCIENCE", ("json",))
    assert doctor.check_dsbench().startswith("json: there")
