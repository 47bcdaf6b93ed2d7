"""The device that a run computes on, and the environment variables that its processes start with.

Invariant: `prepare_environment` runs before the first import of verl or Ray, which read these variables.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import ROOT
from recipe.dag.settings.absolute import absolute


def choose_platform(config: DictConfig) -> str:
    """Return cuda or cpu. Raises UserError if cuda is requested but missing."""
    import torch

    available = torch.cuda.is_available()
    if config.platform not in ("auto", "cuda", "cpu"):
        raise UserError(f"platform={config.platform} is unknown; choose auto, cuda or cpu")
    if config.platform == "cuda" and not available:
        raise UserError("platform=cuda, but torch sees no GPU; run on a CUDA host or with platform=cpu")
    return "cuda" if available and config.platform != "cpu" else "cpu"


_SERVER_AHEAD = """
import sglang.srt.managers.scheduler
from flashinfer.jit.norm import gen_norm_module
gen_norm_module().build(verbose=False)
"""
"""Reads and compiles what each process of an inference server imports, and builds the kernel that takes longest."""


def start_ahead() -> None:
    """Prepare this machine for SGLang's processes in one beside this one, which loads torch, Ray and the trainer
    meanwhile. Its first imports and kernels took 100 s on a machine that had never started a server (16 cores, H100);
    where they are cached it costs some seconds of one core. Whatever fails in it is met again, and reported, by the
    server itself."""
    if find_spec("sglang") is None:
        return
    quiet = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-c", _SERVER_AHEAD], stdin=quiet, stdout=quiet, stderr=quiet)


def prepare_environment(platform: str) -> None:
    """Set the environment variables for verl and every Ray process; call it before `import verl`."""
    # verl warns about each engine that is not installed
    warnings.filterwarnings("ignore", message=r"\w+ engine is not available")
    threads = os.cpu_count() or 1
    if platform == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        # The run's processes share the cores: a thread that spins while it waits takes the time of those that work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    else:
        import torch

        threads = (threads - 2) // max(1, torch.cuda.device_count())
    # Ray limits a process to one thread; optimizers in host memory (FSDP2's offloading) need all
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # verl's own default, except in its platforms
    modules = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
    if "recipe.dag.platform.plugin" not in modules:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, "recipe.dag.platform.plugin"])
    paths = [str(ROOT), *[absolute(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
