"""verl's FSDP2 engines on packed rows: inputs are prepared in host memory, log-probs computed without logits, and
weights that a pass has gathered stay for its other micro-batches (`fsdp_config.reshard_after_forward=false`).

Invariant: the engines compute the same results as verl's: rows, masks, losses, optimizer, checkpoints and every
configuration key are verl's. They are registered under a (device, vendor) key, which takes precedence over verl's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device, get_vendor
from verl.utils.model import convert_weight_keys
from verl.workers.engine import utils
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from recipe.dag.policy import jagged, linear_head, recompute
from recipe.dag.policy.attention import VARLEN
from recipe.dag.policy.jagged import lengths_of, offsets_of, pinned_to, positions_before
from recipe.dag.policy.linear_head import Scored
from recipe.dag.report.jsonfile import replace_file

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    class Engine(FSDPEngine):
        """The interface of verl's engines with a head, whose types their decorators hide."""

        def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]: ...

        def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module: ...

        def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer: ...

        def lr_scheduler_step(self) -> float: ...

        def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None: ...

        def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool): ...

        def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager: ...

        def prepare_model_outputs(self, output, output_args: dict, micro_batch: TensorDict, func) -> dict: ...

else:  # a mixin: the subclass decides which of verl's engines its super() calls reach
    Engine = object

logger = logging.getLogger(__name__)


class PackedInputs(Engine):
    """Mixin for verl's engines: passes the offsets of packed rows to the model, so that no layer recomputes them, and
    prepares a micro-batch while the GPU computes the one before."""

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
        """Compute what verl's does, which prepares the inputs on the GPU, and there reads sizes and the loss: each time
        the host waits until the GPU has nothing left to do."""
        inputs, output_args = self.prepare_model_inputs(micro_batch)
        if get_device_name() == "cuda":
            device = torch.device("cuda", get_device_id())
            move = partial(pinned_to, device)
            micro_batch = micro_batch.apply(move, device=device)
            inputs = {name: _moved(part, move) for name, part in inputs.items()}
            output_args = {name: _moved(part, move) for name, part in output_args.items()}
        half = self._autocast_dtype != torch.float32
        with torch.autocast(get_device_name(), dtype=self._autocast_dtype) if half else nullcontext():
            output = self.module(**inputs, use_cache=False)
            model_output = self.prepare_model_outputs(output, output_args, micro_batch, loss_function)
            if loss_function is None:
                assert forward_only
                loss, metrics = torch.tensor(1.0), {}
            else:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=group)
        return loss, {"model_output": utils.detach_tree(model_output), "loss": loss.detach(), "metrics": metrics}

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if tu.get_non_tensor_data(micro_batch, "use_remove_padding", True) and not self.pad_to_length:
            ids = cast(Tensor, micro_batch["input_ids"])
            cu_lens, longest = offsets_of(ids).to(torch.int32), lengths_of(ids)[1]
            if padding := -ids.values().shape[0] % self.ulysses_sequence_parallel_size:
                # verl's, a row of its own, so that each rank has as many tokens
                cu_lens = torch.cat([cu_lens, cu_lens[-1:] + padding])
            # transformers' names; without them every layer derives the offsets anew, and waits for the GPU to do so
            inputs |= {"cu_seq_lens_q": cu_lens, "cu_seq_lens_k": cu_lens}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        return inputs, output_args

    def packs(self, micro_batch: TensorDict) -> bool:
        """Check that rows are packed, and neither split over GPUs nor padded to a bucket."""
        return bool(tu.get_non_tensor_data(micro_batch, "use_remove_padding", True) and self.keeps_rows_whole)

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.rank == 0:
            forget_attention(Path(local_path) / "huggingface" / "config.json")

    @property
    def keeps_rows_whole(self) -> bool:
        return not (self.use_ulysses_sp or self.pad_to_length)


class GatheredWeights(Engine):
    """Mixin for verl's engines: with `reshard_after_forward=false`, all micro-batches of a pass use weights that are
    gathered once, and none stay gathered after it."""

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        stay = not (self.engine_config.reshard_after_forward or is_last_micro_batch)
        if not is_last_micro_batch:
            self._gather_what_never_was()
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch):
            self.module.set_reshard_after_backward(not stay)
            yield

    def _gather_what_never_was(self) -> None:
        """Gather once the weights of layers that no pass has called, as of a vision tower or of output embeddings below
        a value head: where FSDP2 reduces no gradients, it fails for such layers (`to_accumulated_grad_if_needed`)."""
        for module in self.module.modules():
            if not isinstance(module, FSDPModule):
                continue
            group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if group is not None and not all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                module.unshard()
                module.reshard()

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False):
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            if forward_only:  # a backward pass frees them itself
                for module in self.module.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()


class FullOffload(Engine):
    """Mixin for verl's engines: offloading also frees the GPU memory of the optimizer's state.

    verl empties the allocator's cache before it moves that state, whose memory would otherwise stay reserved while
    other policies on the GPU train.
    """

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        # on the CPU platform, "cpu" is where the model trains, and nothing is freed
        if optimizer and device == "cpu" and device != get_device_name():
            get_torch_device().synchronize()  # the copies are asynchronous
            get_torch_device().empty_cache()


class QuantizedMoments(Engine):
    """Mixin for verl's engines: optimizers of torchao (`optim.optimizer_impl`)."""

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        if self.optimizer_config.optimizer_impl.startswith("torchao") and get_device_name() == "cpu":
            # it compiles its step for each shape, which takes a CPU longer than the steps of a small run
            torch.compiler.set_stance("force_eager")
        return super()._build_optimizer(module)

    def lr_scheduler_step(self) -> float:
        return float(super().lr_scheduler_step())  # torchao's is a tensor


class PolicyEngine(QuantizedMoments, FullOffload, GatheredWeights, PackedInputs, FSDPEngineWithLMHead):
    """Scores only the sampled tokens of packed rows.

    `fused_kernel_options` of the model's configuration: `impl_backend` selects the implementation: triton or torch
    compute log-probs without logits, null computes them from the model's logits. `recompute_mlp_only` and
    `recompute_nothing` are numbers of layers (`recompute.install`).
    """

    fused = False
    served_dtype: torch.dtype | None = None
    """The inference servers'; None: weights are sent as verl sends them."""
    holds_schedule = False
    """Whether another update of the same step follows: the learning rate changes once a step."""

    def lr_scheduler_step(self) -> float:
        if self.holds_schedule and self.lr_scheduler is not None:
            return float(self.lr_scheduler.get_last_lr()[0])
        return super().lr_scheduler_step()

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        self._change_layers(module)
        options = self.model_config.fused_kernel_options or {}
        if self.model_config.enable_gradient_checkpointing:
            layers = (options.get(key) or 0 for key in ("recompute_mlp_only", "recompute_nothing"))
            recompute.install(module, *layers)
        backend = options.get("impl_backend")
        if backend is not None and self.use_remove_padding and self.keeps_rows_whole:
            if reason := linear_head.why_not(module):
                logger.warning("%s: log-probs are computed from logits: %s", type(module).__name__, reason)
            else:
                linear_head.install(module, backend)
                self.fused = True
        return module

    def _change_layers(self, module: torch.nn.Module) -> None:
        """For subclasses: change the model's layers before their recompute is installed."""

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterable[tuple[str, Tensor]], dict | None]:
        """Return (name, whole weight) of each weight, and no configuration of an adapter.

        verl gathers weights in the trainer's number format. Here a matrix is rounded to the servers' before it is
        gathered, as a server rounds what it keeps in that format: half of the bytes go between GPUs and to the servers.
        """
        if self.served_dtype is None:
            return super().get_per_tensor_param(**kwargs)
        module: Any = self.module  # a model that FSDP2 has sharded in place
        names = {name for part in (module.named_parameters(), module.named_buffers()) for name, _ in part}
        # a tied weight has two names in the state, of which servers need one, as model files have one
        weights = {name: weight for name, weight in module.state_dict().items() if name in names}
        weights = convert_weight_keys(weights, module)
        whole = ((name, self._whole(weight)) for name, weight in weights.items())
        return unfuse_moe_params(whole, self.model_config.hf_config.model_type), None

    def _whole(self, weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight
        weight = weight.to(get_device_id(), non_blocking=True)
        if weight.dim() > 1:  # servers keep some vectors in fp32
            weight = weight.to(self.served_dtype)
        return cast(DTensor, weight).full_tensor()

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.packs(micro_batch):
            # verl's rolled ids have, at each position, the token that follows it
            tokens, temperature = output_args["input_ids_rmpad_rolled"], micro_batch["temperature"]
            positions = sampled_positions(micro_batch["input_ids"], micro_batch["response_mask"])
            if isinstance(temperature, Tensor):
                # [rows], which verl has expanded to one per packed token
                temperature = output_args["temperature_rmpad"][positions]
            output_args["scored"] = Scored(positions, tokens[positions], temperature)
            if self.fused:
                inputs["scored"] = output_args["scored"]
        return inputs, output_args

    def prepare_model_outputs(self, output, output_args: dict, micro_batch: TensorDict, logits_processor_func) -> dict:
        if not self.packs(micro_batch):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        scored: Scored = output_args["scored"]
        ids = cast(Tensor, micro_batch["input_ids"])
        if not self.fused:
            log_probs, entropy = linear_head.score_logits(output.logits.squeeze(0), scored)
            output = {"log_probs": log_probs, "entropy": entropy}
        # verl's loss would include an entropy that it finds, asked for or not
        if not tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            output = {"log_probs": output["log_probs"]}
        # verl expects a value for every token; those that were not scored are 0
        blank = torch.zeros(ids.values().shape, device=ids.device)
        return {
            name: torch.nested.nested_tensor_from_jagged(blank.index_copy(0, scored.positions, values), offsets_of(ids))
            for name, values in output.items()
        }


def forget_attention(config: Path) -> None:
    """Remove this package's attention from a saved model's config.json: other programs do not know its name."""
    try:
        saved = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the checkpoint has no model folder (`checkpoint.save_contents`)
        return
    keys = [key for key in ("attn_implementation", "_attn_implementation") if saved.get(key) == VARLEN]
    if keys:
        kept = {key: value for key, value in saved.items() if key not in keys}
        replace_file(config, [json.dumps(kept, indent=2).encode() + b"\n"])


def sampled_positions(input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return the positions [sampled], among the packed tokens, whose next token the policy sampled.

    Both arguments are jagged, [rows, tokens]; the mask covers the last tokens of each row. If nothing was sampled, the
    result is the first position, so that the parameters get a gradient on every rank.
    """
    positions = positions_before(input_ids, response_mask)
    sampled = positions[response_mask.values() != 0]
    return sampled if len(sampled) else positions.new_zeros(1)


def _moved(part: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Scored):
        return Scored(*[_moved(each, move) for each in (part.positions, part.tokens, part.temperature)])
    return move(part) if isinstance(part, Tensor) else part


def register(engine: type[FSDPEngineWithLMHead] = PolicyEngine) -> None:
    """Make verl's TrainingWorker build `engine` in this process, and cut batches by this package."""
    jagged.register()
    # verl's own function refuses to replace a class, as a process may here that has a policy of another kind next
    engines: dict[Any, type] = EngineRegistry._engines.setdefault("language_model", {}).setdefault("fsdp2", {})
    engines[get_device_name(), get_vendor()] = engine
