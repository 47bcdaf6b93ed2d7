"""One process of supervised fine-tuning: `python -m recipe.dag.train.sft.process CONFIG_YAML`, started by torchrun.

Invariant: a process that is alone needs neither a network nor Ray. SIGTERM ends training with a checkpoint after the
current step.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.dag.core.errors import UserError
from recipe.dag.platform.adapter_weights import target_layers
from recipe.dag.policy.config import check_kernels, check_optimizer, prepare_model, reduce_gradients_once
from recipe.dag.policy.critic_config import FP32
from recipe.dag.settings.defaults import SPARE
from recipe.dag.train.models import load_model, skeleton
from recipe.dag.train.sft.checkpoint import check_intact, experiment, find_start, publish_model
from recipe.dag.train.sft.compose import adapter_shape
from recipe.dag.train.sft.data import TranscriptDataset, check_batch_size
from recipe.dag.train.sft.supervise import MISTAKE, errors_of
from recipe.dag.workflow.machine import this_machine
from recipe.dag.workflow.memory import CONTEXT
from recipe.dag.workflow.model_size import UnknownSize, size_of
from recipe.dag.workflow.trainer_memory import TrainerOptions, moment_bytes, update_phases

if TYPE_CHECKING:
    from recipe.dag.train.sft.trainer import Trainer


class Inputs(NamedTuple):
    """The inputs that a run reads before it starts."""

    facts: dict[str, Any]
    """Of the experiment, for its checkpoints."""
    datasets: tuple[TranscriptDataset, TranscriptDataset | None] | None
    """Training and validation; None for a user's data set (`data.custom_cls`), which verl makes."""


def check(config: DictConfig, *, processes: int) -> Inputs | None:
    """Complete the configuration in place, check everything that training reads, and print what it will do. Returns
    None if nothing is left to train. Raises UserError."""
    from transformers import AutoTokenizer

    _check_divisible(config, processes)
    config.model.path, _ = load_model(config.model.path, "--model", trust_remote_code=config.model.trust_remote_code)
    _check_adapter(config)
    _complete(config, processes)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"--model: {config.model.path}: its tokenizer cannot be loaded ({line})") from error
    if config.model.custom_chat_template is not None:
        tokenizer.chat_template = config.model.custom_chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"--model: {config.model.path}: the tokenizer has no chat template, which turns messages into tokens; use "
            "a model with one, or pass model.custom_chat_template=..."
        )
    own_data = str(config.data.custom_cls.path).endswith("recipe.dag.train.sft.data")
    datasets = _datasets(config, tokenizer) if own_data else None
    facts = experiment(config)
    start = find_start(config, facts, processes=processes)
    if start is not None:
        check_intact(start)
    if datasets is not None:
        epoch = len(datasets[0]) // config.data.train_batch_size
        steps = int(config.trainer.total_training_steps or epoch * config.trainer.total_epochs)
        done = 0 if start is None else int(start.name.rpartition("_")[2])
        if start is not None and done >= steps:
            print(
                f"the checkpoint is at step {done} of {steps}: nothing to do; raise trainer.total_epochs to continue\n"
                f"model: {publish_model(config, start)}"
            )
            return None
    if start is not None:
        print(f"resuming from {start}")
    return Inputs(facts, datasets)


def _check_adapter(config: DictConfig) -> None:
    shape = adapter_shape(config)
    if shape is None:
        return
    if config.optim.optimizer.endswith("8bit"):
        raise UserError(f"optim.optimizer={config.optim.optimizer} is for whole models; an adapter is small: remove it")
    try:
        target_layers(skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code), shape.targets)
    except UserError as error:
        raise UserError(f"lora.targets: {error}") from error


def _check_divisible(config: DictConfig, processes: int) -> None:
    parallel = int(config.engine.ulysses_sequence_parallel_size)
    if processes % parallel:
        raise UserError(
            f"engine.ulysses_sequence_parallel_size={parallel} does not divide the {processes} processes; change it "
            "or trainer.n_gpus_per_node"
        )


def _complete(config: DictConfig, processes: int) -> None:
    """Fill in the settings that follow from others, and those of the platform."""
    cpu = config.platform == "cpu"
    with open_dict(config):
        if config.data.max_token_len_per_gpu is None:
            config.data.max_token_len_per_gpu = config.data.max_length
        if config.data.use_dynamic_bsz and config.data.max_token_len_per_gpu < config.data.max_length:
            raise UserError(
                f"data.max_token_len_per_gpu={config.data.max_token_len_per_gpu} is below "
                f"data.max_length={config.data.max_length}, so the longest transcript would not fit; raise it"
            )
        parallel = int(config.engine.ulysses_sequence_parallel_size) > 1
        prepare_model(config.model, platform=config.platform, sequence_parallel=parallel)
        config.engine.seed = config.seed
        if adapter_shape(config) is not None and not cpu:
            config.engine.model_dtype = "bf16"  # of the frozen model; the adapter is fp32
        if config.engine.reshard_after_forward is None:
            # offloaded weights are gathered from host memory, to have few of them on the GPU
            config.engine.reshard_after_forward = processes > 1 or bool(config.engine.offload_policy)
        config.trainer.device = config.platform
        config.trainer.profile_interval = [-1, -1]
        if cpu:
            config.model.enable_gradient_checkpointing = False
            config.engine.use_torch_compile = False
            config.engine.mixed_precision = FP32
        elif config.model.enable_gradient_checkpointing is None:
            config.model.enable_gradient_checkpointing = not _fits(config, processes, checkpointing=False)
            layers = "all layers" if config.model.enable_gradient_checkpointing else "none"
            print(f"recomputed in the backward pass: {layers}")
        recompute = bool(config.model.enable_gradient_checkpointing)
        whole = processes == 1 or _fits(config, processes, checkpointing=recompute, reduce_once=True)
        reduce_gradients_once(config.engine, fits=whole)
    check_kernels(config.model, "model")
    check_optimizer(config.optim, "optim")


def _fits(config: DictConfig, processes: int, *, checkpointing: bool, reduce_once: bool = False) -> bool:
    """Return whether an update with or without recompute fits on each GPU and leaves `SPARE` of it free."""
    available = min(this_machine().gpu_bytes, default=0)
    model, data = config.model, config.data
    fused = model.fused_kernel_options["impl_backend"] == "triton" and model.use_remove_padding
    if not (available and fused and data.use_dynamic_bsz) or model.enable_activation_offload:
        return False
    options = TrainerOptions(
        tokens=data.max_token_len_per_gpu,
        offload_policy=config.engine.offload_policy,
        checkpointing=checkpointing,
        liger=model.use_liger,
        reshard=config.engine.reshard_after_forward,
        reduce_once=reduce_once,
        moments=moment_bytes(config.optim.optimizer),
    )
    try:
        size, shape = size_of(model.path), adapter_shape(config)
        if shape is not None:
            options = replace(options, adapters=size.adapter_parameters(shape.rank))
        phases = update_phases(size, processes, options)
    except UnknownSize:
        return False
    return max(phase.used for phase in phases) + CONTEXT <= available * (1 - SPARE)


def _datasets(config: DictConfig, tokenizer: Any) -> tuple[TranscriptDataset, TranscriptDataset | None]:
    """Encode all transcripts, for training and validation, and print a line on each file. Raises UserError."""
    data = config.data
    train = TranscriptDataset(data.train_files, tokenizer, data, max_samples=data.train_max_samples)
    print(f"training: {train.summary()}")
    if not train.encoder.calls_by_template:
        print("tool calls are written in <tool_call> tags: the tool loop does not read the chat template's own form")
    validation = None
    if data.val_files:
        validation = TranscriptDataset(data.val_files, tokenizer, data, max_samples=data.val_max_samples)
        print(f"validation: {validation.summary()}")
    check_batch_size(data.train_batch_size, len(train))
    return train, validation


def train(config: DictConfig, inputs: Inputs, *, announce: Callable[[str], None] = lambda _: None) -> int:
    """Train in this process, alone or as one of torchrun's, and return the exit code. Raises UserError."""
    _join(config.platform, timedelta(seconds=config.trainer.nccl_timeout))
    import torch

    from recipe.dag.train.sft.trainer import Trainer

    stop = _Stop()
    try:
        announce("building the model")
        trainer = Trainer(config, inputs.facts, lambda: stop.signum is not None, inputs.datasets)
        announce("training")
        code = _fit(trainer, config, stop)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the GPU is out of memory ({str(error).splitlines()[0]}); lower data.max_token_len_per_gpu or "
            "data.max_length, use more GPUs, or set engine.offload_policy=true"
        ) from error
    torch.distributed.destroy_process_group()  # not after an error, since it would wait for the other processes
    return code


def _fit(trainer: Trainer, config: DictConfig, stop: _Stop) -> int:
    with stop:
        try:
            folder = trainer.fit()
        except KeyboardInterrupt:
            print("interrupted; the same command resumes from the last checkpoint, if there is one", file=sys.stderr)
            return 130
    if trainer.rank == 0 and folder is not None:
        _finish(config, folder, stop)
    return 128 + stop.signum if stop.signum is not None else 0


def _finish(config: DictConfig, folder: Path, stop: _Stop) -> None:
    from recipe.dag.report.curve import why_not_drawn

    output = Path(config.output_dir)
    if fault := why_not_drawn(output / "metrics.jsonl", output / "curve.png"):
        print(f"curve.png was not written: {fault}", file=sys.stderr)
    if stop.signum is not None:
        print(f"stopped by a signal; the same command resumes from {folder}", file=sys.stderr)
        return
    print(f"checkpoint: {folder}\nmodel: {publish_model(config, folder)}")


class _Stop:
    """Notes SIGTERM while it is entered."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: Any = None

    def __enter__(self) -> _Stop:
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_exception: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _note(self, signum: int, _frame: object) -> None:
        self.signum = signum


def _join(platform: str, timeout: timedelta) -> None:
    """Join torch's process group: torchrun's, or one of this process alone. `timeout`: of its collectives."""
    import torch
    from torch._C._distributed_c10d import HashStore

    alone = "LOCAL_RANK" not in os.environ
    if alone:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            os.environ[name] = value
        # verl's workers read them; nothing connects to them
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    # verl would ask for "cpu:gloo,cpu:gloo" on a CPU, which torch rejects
    backend = "gloo" if platform == "cpu" else "cpu:gloo,cuda:nccl"
    options = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
    if platform != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend, timeout=timeout, **options)


def main(arguments: list[str]) -> int:
    """Train as one of torchrun's processes. What only a traceback explains, also of NCCL's threads, goes to a file
    of this process, since the loss of one process makes all others fail."""
    # verl warns about each engine that is not installed
    warnings.filterwarnings("ignore", message=r"\w+ engine is not available")
    config = OmegaConf.load(arguments[0])
    assert isinstance(config, DictConfig)  # the file that `recipe.dag.train.sft.launch` wrote
    rank = os.environ["RANK"]
    errors = errors_of(Path(arguments[0]), rank).open("w")
    sys.stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)  # what Python prints is seen as before
    os.dup2(errors.fileno(), 2)
    try:
        return train(config, Inputs(experiment(config), None))
    except UserError as error:
        # each process loads and writes its own files, and torchrun ends the others when the first one fails
        print(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}", file=sys.stderr)
        code = MISTAKE
    except Exception:
        traceback.print_exc(file=errors)
        code = 1
    for stream in (sys.stdout, sys.stderr, errors):
        stream.flush()
    os._exit(code)  # the interpreter's way out joins NCCL's threads, which wait for the other processes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
