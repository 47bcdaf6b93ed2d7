"""The weight canary: after every weight sync, each server of a policy and its trainer score one fixed prompt.

Invariant: `check` returns only if every server has the weights that the trainer sent: it reports their version, its
log-probs differ from the trainer's by no more than the number format explains, and they moved if the trainer's did. No
random number is drawn and no weight changed, so the run's other figures are the same without it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from recipe.dag.core.errors import UserError

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker

TEXT = """\
On Monday the library counted its books. The first room held 1,248 novels and 96 atlases, the second twice as many, and
the cellar only letters, some of them in French: "Je vous remercie de votre patience." A clerk wrote a short program,
total = sum(room.books for room in rooms), and checked its answer by hand, because last year's list had been wrong by
exactly one shelf. By the evening the rain had stopped. Nobody had found the missing diary of the astronomer, but they
did know that 3 * (1248 + 96) = 4032, that the roof needs repair, and that children read more in winter than in June.
"""
LENGTH = 128
BOUNDS = {"float32": 1e-4, "bfloat16": 0.15, "fp8": 0.2}
"""Number format -> the largest mean difference of log-probs, in nats, between two engines with the same weights. With
another policy's weights it is about 1. In bfloat16, a server rounds logits between 16 and 32 to multiples of 0.125:
random weights of 3B parameters differ by 0.03, SmolLM2 by 0.05 to 0.06, Gemma 3 on a CPU by 0.04."""
MOVED = 0.07
"""Share of the bound by which the trainer's log-probs move before a server's must have changed, too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's log-probs of the prompt [tokens - 1], and the version of the weights that it reports."""

    log_probs: list[float]
    version: int | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The first answer of a server with these log-probs, and the trainer's then."""

    version: int
    answer: list[float]
    expected: list[float]


def prompt_of(tokenizer: Any, max_len: int) -> list[int]:
    """Return the token ids of the text, or all ids if it has none, repeated or cut to LENGTH; fewer if a server with
    contexts of `max_len` tokens has no room for them and a response. The prompt begins with the tokenizer's bos token
    if there is one: without it, Gemma 3's hidden states are larger, and so are the differences."""
    # not len(tokenizer): the model may lack tokens that a tokenizer's class has added
    ids = list(tokenizer.encode(TEXT, add_special_tokens=False)) or list(range(tokenizer.vocab_size))
    bos = getattr(tokenizer, "bos_token_id", None)
    repeated = [*([] if bos is None else [bos]), *ids * -(-LENGTH // len(ids))]
    return repeated[: max(2, min(LENGTH, max_len - 2))]


def number_format(rollout: DictConfig) -> str:
    """Return the coarser format of a policy's server and its trainer, a key of BOUNDS."""
    if rollout.name == "cpu":
        return "float32"
    return "fp8" if rollout.quantization else "bfloat16"


def difference(log_probs: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean absolute difference; infinite if the lengths differ or a number is not finite."""
    if len(log_probs) != len(others) or not others:
        return math.inf
    mean = sum(abs(one - other) for one, other in zip(log_probs, others, strict=True)) / len(others)
    return mean if math.isfinite(mean) else math.inf


def score(actor: TrainingWorker, prompt: list[int], *, loaded: bool) -> list[float]:
    """Return the log-probs [tokens - 1] of the prompt by the actor's weights, on every rank whose engine has outputs.

    All ranks must call it. `loaded`: the weights are on the device, also if they are offloaded between passes."""
    ids = torch.tensor(prompt)
    mask = torch.ones(len(prompt) - 1, dtype=torch.long)
    columns = {"response_mask": mask, "loss_mask": mask, "input_ids": ids, "position_ids": torch.arange(len(prompt))}
    nested = {name: torch.nested.as_nested_tensor([value], layout=torch.jagged) for name, value in columns.items()}
    data = TensorDict(nested, batch_size=[1])
    options = {"temperature": 1.0, "calculate_entropy": False, "compute_loss": False, "disable_auto_offload": loaded}
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=len(prompt), **options)
    output = actor.infer_batch(data=data)
    if output is None:
        return []
    return response_from_nested(output["log_probs"], data["response_mask"]).unbind()[0].float().tolist()


async def ask(server: Any, prompt: list[int], *, adapter: str | None = None) -> Answer:
    """Ask a server for its log-probs of the prompt. It computes all of them anew: SGLang uses no cached prefix for a
    request for the log-probs of its prompt."""
    sampling = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0, "logprobs": True}
    extra = {} if adapter is None else {"adapter": adapter}
    output = await server.generate.remote(
        request_id=f"canary-{uuid4().hex}", prompt_ids=list(prompt), sampling_params=sampling, **extra
    )
    # verl's form, [tokens, 1]: a row is about the next token, so that of the last one has no meaning
    rows = output.extra_fields["prompt_logprobs"][:-1]
    return Answer([row[0] for row in rows], output.extra_fields.get("global_steps"))


class Canary:
    """Compares the servers of one policy with its trainer."""

    def __init__(
        self, policy: str, prompt: list[int], replicas: Sequence[Any], number_format: str, *, adapter: str | None = None
    ):
        """`replicas`: verl's, of which each has a `server_handle` and a `server_address`. `adapter`: the servers' name
        of the policy, if it is not their model."""
        self.adapter = adapter
        self.policy, self.prompt, self.replicas, self.format = policy, prompt, replicas, number_format
        self.bound = BOUNDS[number_format]
        self.difference = math.nan
        """The largest of the last check."""
        self.seconds = 0.0
        """That the last check took, with the trainer's pass."""
        self._seen: dict[str, _Seen] = {}

    async def check(self, expected: list[float], version: int, *, seconds: float = 0.0) -> None:
        """Compare all servers with the trainer's log-probs `expected`, which took `seconds`. Raises UserError, which
        names each server that does not have the weights of `version`."""
        started = time.monotonic()
        answers = await asyncio.gather(
            *[ask(replica.server_handle, self.prompt, adapter=self.adapter) for replica in self.replicas]
        )
        self.seconds = seconds + time.monotonic() - started
        self.difference = max(difference(answer.log_probs, expected) for answer in answers)
        if not all(map(math.isfinite, expected)):
            raise UserError(
                f"policy {self.policy}, version {version}: the trainer's log-probs are not finite, so its weights have "
                "diverged; lower the learning rate, and resume from the last checkpoint"
            )
        wrong = [
            f"server {rank} ({replica.server_address}) {problem}"
            for rank, (replica, answer) in enumerate(zip(self.replicas, answers, strict=True))
            if (problem := self._problem(replica.server_address, answer, expected, version))
        ]
        if wrong:
            raise UserError(
                f"policy {self.policy}, version {version}: {len(wrong)} of {len(answers)} servers do not have the "
                f"trainer's weights: {'; '.join(wrong)}. The run ends before they are used; start it again to resume "
                "from the last checkpoint (rollout.canary=false: without this check)"
            )

    def _problem(self, address: str, answer: Answer, expected: list[float], version: int) -> str:
        """Return what is wrong with an answer; "" if nothing is."""
        if answer.version != version:
            return f"reports version {answer.version}: no sync reached it since, or it was started again"
        distance = difference(answer.log_probs, expected)
        if distance > self.bound:
            return (
                f"has other weights: its log-probs of a fixed prompt differ from the trainer's by {distance:.2g} on "
                f"average, and {self.format} explains {self.bound:g}"
            )
        seen = self._seen.get(address)
        if seen is None or seen.answer != answer.log_probs:
            self._seen[address] = _Seen(version, answer.log_probs, expected)
        elif (moved := difference(expected, seen.expected)) > MOVED * self.bound:
            return (
                f"still has the weights of version {seen.version}: it answers exactly as then, but the trainer's "
                f"log-probs have moved by {moved:.2g}"
            )
        return ""


def canary_metrics(policies: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of the last checks of the policies that have a `canary`."""
    canaries: list[Canary] = [policy.canary for policy in policies if policy.canary is not None]
    metrics = {f"canary/{canary.policy}/logprob_diff": canary.difference for canary in canaries}
    return metrics | ({"timing/canary": sum(canary.seconds for canary in canaries)} if canaries else {})
