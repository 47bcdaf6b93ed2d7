"""`verl-dag sft`: supervised fine-tuning of one model on transcripts, by verl's SFT trainer.

Invariant: data, model, settings and disk are checked before anything is started; a mistake of the user is one line. One
process trains in this one; several are started by torchrun (`supervise`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.output_lock import locked
from recipe.dag.platform.environment import choose_platform, prepare_environment
from recipe.dag.report.phases import announce, end_phase
from recipe.dag.settings.absolute import make_absolute
from recipe.dag.train.sft import supervise
from recipe.dag.train.sft.compose import NAME, adapter_shape, compose_sft
from recipe.dag.workflow.model_size import UnknownSize, size_of

SHUTDOWN_VARIABLE, SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 3600
"""Seconds that torchrun waits between SIGTERM and SIGKILL: a step, and a checkpoint of a large model, take long."""
BYTES_PER_PARAMETER = 16
"""Of a checkpoint: weights and two moments in fp32, and the model folder."""


def launch(overrides: list[str], *, name: str = NAME, folder: Path | None = None) -> None:
    """Compose the configuration, check it and train. Raises UserError before anything is started, and SystemExit with
    the shell's code after a signal ended the run."""
    try:
        config = compose_sft(overrides, name=name, folder=folder)
        make_absolute(config)
        with locked([config.output_dir, config.trainer.default_local_dir]) as locks:
            code = _run(config, locks)
    finally:
        end_phase()
    if code:
        raise SystemExit(code)


def _run(config: DictConfig, locks: tuple[int, ...]) -> int:
    """Check everything and train; return the exit code. `locks`: the descriptors that hold the folders' locks."""
    _check_disk(config)
    announce("importing torch")
    _choose_devices(config)
    processes = int(config.trainer.n_gpus_per_node)
    announce("reading the transcripts")
    from recipe.dag.train.sft.process import check, train

    inputs = check(config, processes=processes)
    if inputs is None:
        return 0
    if processes == 1:
        announce("loading verl")
        return train(config, inputs, announce=announce)
    announce(f"training in {processes} processes")
    return _spawn(config, processes, locks)


def _choose_devices(config: DictConfig) -> None:
    """Choose the platform and the number of processes, and set the environment for verl. Raises UserError."""
    import torch

    platform = choose_platform(config)
    prepare_environment(platform)
    config.platform = platform
    visible = torch.cuda.device_count() if platform == "cuda" else None
    if config.trainer.n_gpus_per_node is None:
        config.trainer.n_gpus_per_node = visible or 1
    if visible is not None and config.trainer.n_gpus_per_node > visible:
        raise UserError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}, but torch sees "
            f"{counted(visible, 'GPU')}; lower it"
        )


def _check_disk(config: DictConfig) -> None:
    """Raise UserError if the output cannot be written, or has no room for a checkpoint; warn if it has too little for
    all that are kept."""
    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output).free
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); pass another --output") from error
    if not os.access(output, os.W_OK):
        raise UserError(f"{output}: cannot be written (Permission denied); pass another --output")
    try:
        size, shape = size_of(config.model.path), adapter_shape(config)
        needed = BYTES_PER_PARAMETER * (size.parameters if shape is None else size.adapter_parameters(shape.rank))
    except UnknownSize:
        return
    if free < needed:
        raise UserError(
            f"{output}: {free / 1e9:.1f} GB free, but a checkpoint takes about {needed / 1e9:.1f} GB; make room, or "
            "pass another --output"
        )
    # one is written before the oldest is deleted
    most = needed * (int(config.trainer.max_ckpt_to_keep) + 1)
    if free < most:
        print(
            f"warning: {output}: {free / 1e9:.1f} GB free, and the checkpoints will take up to {most / 1e9:.1f} GB; "
            "set trainer.max_ckpt_to_keep=1, or save less often (trainer.save_freq=-1: only at the end)",
            file=sys.stderr,
        )


def _spawn(config: DictConfig, processes: int, locks: tuple[int, ...] = ()) -> int:
    """Train in `processes` processes on this machine and return the exit code."""
    file = Path(config.output_dir) / "run" / "sft.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, file)
    command = [sys.executable, "-m", supervise.__name__, str(processes), str(file)]
    environment = {SHUTDOWN_VARIABLE: str(SHUTDOWN_S), **os.environ}
    # torchrun outlives this process if that is killed, and then still writes to the folders
    process = subprocess.Popen(command, env=environment, pass_fds=locks)
    received: list[int] = []

    def pass_on(signum: int, _frame: object) -> None:
        received.append(signum)
        if signum == signal.SIGTERM:  # torchrun passes it on, and the processes end with a checkpoint
            process.send_signal(signum)

    # a terminal sends Ctrl-C to torchrun, too
    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else code
