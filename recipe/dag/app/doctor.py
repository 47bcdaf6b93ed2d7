"""`verl-dag doctor`: checks that this machine has everything a run needs.

Invariant: every check prints one line, whatever happens in it, and changes nothing on the machine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import ROOT
from recipe.dag.core.printable import printable
from recipe.dag.core.versions import package_version
from recipe.dag.policy.attention import missing_attention
from recipe.dag.settings.defaults import liger_is_installed

GIB = 2**30
MIN_MEMORY_GIB, MIN_DISK_GIB = 4, 5
"""Below these, even the tiny run may fail."""
DATA_SCIENCE = ("joblib", "lightgbm", "scipy", "sklearn", "xgboost")
"""Modules of the extra `dsbench`. The sandbox of a run has the packages of this interpreter."""
GPU_PYTHON, GPU_GLIBC, GPU_DRIVER = (3, 12), (2, 34), 580
"""Requirements of the GPU installation, set by requirements-gpu.lock, SGLang's wheels and CUDA 13."""


class Unfit(Exception):
    """A check failed; the message says how to fix it."""


class Note(Exception):
    """A check did not pass, but runs do not depend on it."""


def examine(write: Callable[[str], None], checks: Mapping[str, Callable[[], str]] | None = None) -> bool:
    """Write one line per check, and return whether every required check passed. None: the checks of the machine."""
    fit = True
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            mark, text = "ok", check()
        except Note as note:
            mark, text = "note", str(note)
        except Exception as error:
            reason = str(error) if isinstance(error, Unfit | UserError) else f"{type(error).__name__}: {error}"
            mark, text, fit = "FAIL", " ".join(reason.split()), False
        write(printable(f"{mark:<5} {name:<11} {text}"))
    return fit


def check_python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise Unfit(f"{version}; use Python 3.11 or 3.12")
    return version


def check_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{torch.__version__}, no CUDA device: runs use platform=cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    free, total = (number / GIB for number in torch.cuda.mem_get_info())
    return f"{torch.__version__}, {len(names)} x {names[0]}, {free:.0f} of {total:.0f} GiB free on the first"


def check_gpu_host() -> str:
    """Compare driver, glibc and Python with the requirements of the GPU installation."""
    glibc, python = _libc(), ".".join(map(str, sys.version_info[:2]))
    needs = f"driver {GPU_DRIVER}, glibc {_dotted(GPU_GLIBC)}, Python {_dotted(GPU_PYTHON)} on Linux x86-64"
    driver = _driver()
    if driver is None:
        raise Note(f"no NVIDIA driver; a GPU installation needs {needs}")
    problems = []
    if int(driver.partition(".")[0]) < GPU_DRIVER:
        problems.append(f"driver {driver} is older than {GPU_DRIVER}, which CUDA 13 needs; update it")
    if _numbers(glibc) < GPU_GLIBC:
        problems.append(f"glibc {glibc or 'missing'} is older than {_dotted(GPU_GLIBC)}, which SGLang's wheels need")
    if platform.machine() not in ("x86_64", "AMD64"):
        problems.append(f"requirements-gpu.lock is for x86-64, not {platform.machine()}")
    if sys.version_info[:2] != GPU_PYTHON:
        problems.append(f"requirements-gpu.lock is for Python {_dotted(GPU_PYTHON)}, not {python}")
    if problems:
        raise (Unfit if package_version("sglang") else Note)("; ".join(problems))
    return f"driver {driver}, glibc {glibc}, Python {python}: fit for the GPU installation"


def check_verl() -> str:
    pinned, installed = pinned_verl(), package_version("verl")
    if installed != pinned:
        raise Unfit(f"{installed or 'not installed'}; this project needs verl=={pinned}")
    return f"{installed}, as pinned"


def pinned_verl() -> str:
    """Return verl's version in the repository's REQUIRED_VERL.txt, or in the installed package's requirements."""
    file = ROOT / "REQUIRED_VERL.txt"
    lines = file.read_text().splitlines() if file.is_file() else metadata.requires("verl-dag") or []
    return next(match[1] for line in lines if (match := re.match(r"verl==([\w.]+)", line)))


def check_package(name: str, missing: type[Unfit | Note], why: str) -> str:
    version = package_version(name)
    if version is None:
        raise missing(f"{name} is not installed; {why}")
    return version


def check_sglang() -> str:
    version = package_version("sglang")
    if version is None and _has_cuda():
        raise Unfit("not installed; GPU runs generate with it: docs/running.md says how to install it")
    if version is None:
        raise Note("not installed; only GPU runs need it")
    return version


def check_flash_attn() -> str:
    if reason := missing_attention("flash_attention_2"):
        raise Note(f"{reason}; nothing needs it unless `attn_implementation: flash_attention_2` asks for it")
    return package_version("flash-attn") or "installed"


def check_liger() -> str:
    if not liger_is_installed():
        raise Note("liger-kernel is not installed; updates on a GPU are a third slower without its kernels")
    return package_version("liger-kernel") or "installed"


def check_dsbench() -> str:
    """Look for what the programs of recipe/dsbench's agents import; its run script checks the same."""
    missing = [name for name in DATA_SCIENCE if importlib.util.find_spec(name) is None]
    if missing:
        raise Note(
            f"the sandbox has no {', '.join(missing)}, which the agents of recipe/dsbench are asked to use; "
            "pip install -e '.[dsbench]', or set sandbox.url to a server that has them"
        )
    return f"{', '.join(DATA_SCIENCE)}: there for the agents of recipe/dsbench"


def check_memory() -> str:
    import psutil

    free = psutil.virtual_memory().available / GIB
    if free < MIN_MEMORY_GIB:
        raise Unfit(f"{free:.1f} GiB free; the tiny run needs {MIN_MEMORY_GIB}")
    return f"{free:.0f} GiB free, {counted(len(os.sched_getaffinity(0)), 'core')}"


def check_disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    if free < MIN_DISK_GIB:
        raise Unfit(f"{free:.1f} GiB free in {Path.cwd()}; the tiny run with its environment needs {MIN_DISK_GIB}")
    return f"{free:.0f} GiB free in {Path.cwd()}"


def check_plugin() -> str:
    """Load the plugin in a separate process, because verl chooses its platform once, at import."""
    on_cpu = not _has_cuda()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if on_cpu:
        env["VERL_PLATFORM"] = "cpu"
    # needed if this package is not installed but is in the recipe/ folder of a verl checkout
    env["VERL_USE_EXTERNAL_MODULES"] = "recipe.dag.platform.plugin"
    code = "from verl.utils.device import get_device_name; print('device:', get_device_name())"
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180)
    device = next((line for line in process.stdout.splitlines() if line.startswith("device: ")), "")
    if process.returncode or not device:
        raise Unfit(f"verl does not load it: {(process.stderr.strip().splitlines() or ['no message'])[-1]}")
    if on_cpu and device != "device: cpu":
        raise Unfit(f"verl chose {device}, not the CPU platform of this plugin")
    points = [point for point in metadata.entry_points(group="verl.plugins") if point.name == "verl_dag"]
    for point in points:
        point.load()
    how = "entry point verl.plugins" if points else "VERL_USE_EXTERNAL_MODULES, which runs set themselves"
    return f"verl loads it ({how}); {device}"


def check_sandbox() -> str:
    from recipe.dag.tools.sandbox import self_test

    report = self_test()
    if report.problems:
        raise Unfit("; ".join(report.problems))
    return report.summary


def check_grader() -> str:
    from recipe.dag.reward.grader import GraderPool

    async def trial() -> tuple[bool, bool]:
        pool = GraderPool(timeout_s=60.0)
        try:
            return await pool.grade(r"\sqrt{8}", r"2\sqrt{2}"), await pool.grade(r"\sqrt{8}", r"2\sqrt{3}")
        finally:
            await pool.close()

    if asyncio.run(trial()) != (True, False):
        raise Unfit("sqrt(8) must equal 2*sqrt(2) but not 2*sqrt(3), and the grader disagrees; reinstall math-verify")
    return "sqrt(8) equals 2*sqrt(2) but not 2*sqrt(3)"


def _driver() -> str | None:
    """Return the version of the NVIDIA driver; None if nvidia-smi is missing or does not report one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.match(r"\d+(?:\.\d+)*", process.stdout.strip())
    return version[0] if version and not process.returncode else None


def _libc() -> str:
    name, version = platform.libc_ver()
    return version if name == "glibc" else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


CHECKS: dict[str, Callable[[], str]] = {
    "python": check_python,
    "torch": check_torch,
    "gpu-host": check_gpu_host,
    "verl": check_verl,
    "ray": partial(check_package, "ray", Unfit, "pip install 'ray[default]'"),
    "sglang": check_sglang,
    "flash-attn": check_flash_attn,
    "liger": check_liger,
    "torchao": partial(check_package, "torchao", Note, "only its optimizers, such as 8-bit Adam, need it"),
    "dsbench": check_dsbench,
    "memory": check_memory,
    "disk": check_disk,
    "plugin": check_plugin,
    "sandbox": check_sandbox,
    "grader": check_grader,
}
