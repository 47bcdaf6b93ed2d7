"""Supervised fine-tuning: verl's SFT trainer, with this project's engine, batches, checkpoints and metrics.

Invariant: verl builds the model, the engine and the loss, and its worker trains the batches. The loss of a step is the
mean over the trained tokens of the whole batch, on all GPUs; that of a validation is the mean over all its tokens. A
resumed run takes the same steps as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from torch import Tensor
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator

from recipe.dag.core.errors import UserError
from recipe.dag.policy.adapter_config import TrainedAdapter
from recipe.dag.policy.adapter_engine import AdapterEngine
from recipe.dag.policy.worker import register_engines, set_timeout_of_process_groups
from recipe.dag.report.journal import Journal
from recipe.dag.train.packing import PAD
from recipe.dag.train.sft.checkpoint import Checkpoints
from recipe.dag.train.sft.compose import adapter_shape
from recipe.dag.train.sft.data import check_batch_size, epoch_batches, padding_of, share
from recipe.dag.train.tracking import Trackers

REPORT_S = 5.0
"""Seconds between two lines on the console."""
COLLATE = SFTTensorCollator(DatasetPadMode.NO_PADDING)


class Trainer(SFTTrainer):
    """Trains one model; one instance per process."""

    def __init__(
        self,
        config: DictConfig,
        facts: dict[str, Any],
        stopped: Callable[[], bool],
        datasets: tuple[Any, Any] | None = None,
    ):
        """`facts`: of the experiment, for its checkpoints. `stopped()`: whether the run was asked to end. `datasets`:
        training and validation, if they have been made already."""
        self._facts, self._stopped, self._datasets = facts, stopped, datasets
        self.global_batch_size = int(config.data.train_batch_size)
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the whole configuration
            super().__init__(config)

    def _build_engine(self) -> None:
        shape, name = adapter_shape(self.config), self.config.policy
        if shape is None:
            register_engines()
        else:  # verl has not counted the steps yet, and writes them into this object
            register_engines(AdapterEngine.holding((TrainedAdapter(name, shape, self.optimizer_config),)))
        super()._build_engine()

    def _init_engine(self) -> None:
        super()._init_engine()
        if isinstance(self.engine, AdapterEngine):
            self.engine.use(self.config.policy)
        # those of the engine's meshes have torch's default
        set_timeout_of_process_groups(timedelta(seconds=self.config.trainer.nccl_timeout))

    def _build_dataset(self) -> None:
        if self._datasets is None:
            super()._build_dataset()
        else:
            self.train_dataset, self.val_dataset = self._datasets

    def _build_dataloader(self) -> None:
        """Check the data set's size; `_batches` deals it out."""
        self._lengths = _lengths(self.train_dataset)
        self._val_lengths = _lengths(self.val_dataset) if self.val_dataset is not None else []
        rows = len(self._lengths)
        check_batch_size(self.global_batch_size, rows)
        # verl counts the steps of an epoch by this list's length
        self.train_dataloader = range(rows // self.global_batch_size)

    def _build_ckpt_handler(self) -> None:
        self.ckpt_handler = Checkpoints(
            self.config, self.engine, self._facts, rank=self.rank, processes=torch.distributed.get_world_size()
        )

    def fit(self) -> Path | None:
        """Train to the last step and return its checkpoint, or that of the step at which the run was asked to end; None
        if there was nothing left to do."""
        step, total = self.resume_global_step, int(self.total_training_steps)
        leads = self.rank == 0
        journal = Journal(self.config.output_dir) if leads else None
        if journal is not None:
            journal.truncate_after(step if step else -1)
        trackers = Trackers(self.config, step=step) if leads else None
        report = _Report(total, self.steps_per_epoch)
        if step == 0 and self.val_dataset is not None:
            self._log(journal, trackers, 0, {"val/loss": self._validate()}, report)
        saved = None
        while step < total:
            epoch, position = divmod(step, self.steps_per_epoch)
            metrics = self._step(self._epoch(epoch)[position])
            step += 1
            last = step == total or self._any_stopped()
            metrics["epoch"] = step / self.steps_per_epoch
            if self.val_dataset is not None and (last or _due(step, self.test_freq)):
                metrics["val/loss"] = self._validate()
            self._log(journal, trackers, step, metrics, report)
            if last or _due(step, self.save_freq):
                saved = self.ckpt_handler.save(step)
            if last:
                break
        if trackers is not None:
            trackers.finish(exit_code=0)
        return saved

    def _epoch(self, epoch: int) -> list[list[int]]:
        if getattr(self, "_dealt", (None, []))[0] != epoch:
            batches = epoch_batches(len(self._lengths), self.global_batch_size, seed=self.config.seed, epoch=epoch)
            self._dealt = epoch, batches
        return self._dealt[1]

    def _step(self, rows: Sequence[int]) -> dict[str, float]:
        """Train on the transcripts `rows` and return the metrics of the step."""
        started = time.monotonic()
        lengths = [self._lengths[row] for row in rows]
        batch, _ = self._tensors(self.train_dataset, rows, lengths)
        tu.assign_non_tensor(batch, update_lr_scheduler=True, global_token_num=NonTensorData(lengths))
        output = self.training_client.train_batch(data=batch)
        seconds = time.monotonic() - started
        metrics = _plain(tu.get(output, "metrics")) if output is not None else {}
        named = {f"train/{key}": metrics.pop(key) for key in ("loss", "grad_norm", "lr", "mfu") if key in metrics}
        tokens = sum(lengths)
        return {
            **named,
            "train/tokens": tokens,
            **metrics,
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": tokens / seconds,
        }

    def _validate(self) -> float:
        """Return the loss per trained token of all validation transcripts."""
        total = count = 0.0
        for start in range(0, len(self._val_lengths), self.global_batch_size):
            rows = range(start, min(start + self.global_batch_size, len(self._val_lengths)))
            batch, trained = self._tensors(self.val_dataset, rows, [self._val_lengths[row] for row in rows])
            output = self.training_client.infer_batch(batch)
            if output is not None:
                total += tu.get(output, "metrics")["loss"] * trained
                count += trained
        return total / count if count else float("nan")

    def _tensors(self, dataset: Any, rows: Sequence[int], lengths: Sequence[int]) -> tuple[TensorDict, int]:
        """Return this process's part of a batch, and the number of trained tokens in the whole batch."""
        ranks = self.engine.get_data_parallel_size()
        own_rows = share(rows, lengths, rank=self.engine.get_data_parallel_rank(), ranks=ranks)
        items = [padding_of(dataset[rows[0]]) if row == PAD else dataset[row] for row in own_rows]
        trained = torch.stack([item["loss_mask"][1:].sum() for item in items]).sum()
        if ranks > 1:
            trained = trained.to(self.config.trainer.device)
            torch.distributed.all_reduce(trained, group=self.engine.get_data_parallel_group())
        columns = COLLATE(items)
        columns["response_mask"] = columns["loss_mask"]  # our engine scores the tokens of this mask alone
        return tu.get_tensordict(tensor_dict=columns, non_tensor_dict=self._options()), int(trained)

    def _options(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "use_remove_padding": self.config.model.use_remove_padding,
            "use_dynamic_bsz": data.use_dynamic_bsz,
            "max_token_len_per_gpu": data.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
            "temperature": 1.0,
            "global_batch_size": self.global_batch_size,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "pad_token_id": self.model_config.tokenizer.pad_token_id or 0,
        }

    def _any_stopped(self) -> bool:
        """Return whether any process was asked to end, so that all end after the same step."""
        if torch.distributed.get_world_size() == 1:
            return self._stopped()
        flag = torch.tensor(int(self._stopped()), device=self.config.trainer.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _log(
        self, journal: Journal | None, trackers: Trackers | None, step: int, metrics: dict[str, float], report: _Report
    ) -> None:
        if journal is None or trackers is None:  # not the leading process
            return
        try:
            journal.metrics(step, metrics)
        except OSError as error:
            raise UserError(
                f"{journal.metrics_path}: cannot be written ({error.strerror}); make room, and the same command "
                "resumes from the last complete checkpoint"
            ) from error
        trackers.log(metrics, step)
        report.show(step, metrics)


class _Report:
    """Lines on the console: the first step, the last one, validations, and others a few seconds apart."""

    def __init__(self, total: int, steps_per_epoch: int):
        self._total, self._steps_per_epoch, self._last = total, steps_per_epoch, 0.0

    def show(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        if "val/loss" not in metrics and step != self._total and now - self._last < REPORT_S:
            return
        self._last = now
        parts = [f"step {step}/{self._total}", f"epoch {step / self._steps_per_epoch:.2f}"]
        names = {"train/loss": "loss", "val/loss": "val loss"}
        parts += [f"{name} {metrics[key]:.4f}" for key, name in names.items() if key in metrics]
        if "perf/tokens_per_second" in metrics:
            parts.append(f"{metrics['perf/tokens_per_second']:,.0f} tokens/s")
        print("  ".join(parts), flush=True)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _lengths(dataset: Any) -> list[int]:
    """Return the number of tokens of each row, also of a user's data set (`data.custom_cls`)."""
    rows = getattr(dataset, "rows", None)
    if rows is not None:
        return [len(row.ids) for row in rows]
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are one number, as floats."""
    single = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics.items()}
    return {key: float(value) for key, value in single.items() if isinstance(value, int | float)}
