"""Make a tiny model: architecture, tokenizer, and a warm start on a careless teacher's dialogues.

    python -m recipe.tiny.build --workflow FILE --teacher FILE:CLASS --output DIR [--seed 0]

Invariant: the same arguments, prompts and answers give the same model, which is made once; the output folder appears
only when it is complete. The result is an ordinary Qwen2 checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2Tokenizer

from recipe.dag.core.errors import Fault, UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.failure import describe
from recipe.dag.loading.workflow_file import load_workflow
from recipe.tiny.dialogue import Demonstration, Teacher
from recipe.tiny.tokenizer import DIALECTS, build_tokenizer

MAX_LENGTH = 1024


class Example(NamedTuple):
    """An encoded demonstration."""

    ids: list[int]
    """Prompt, answer, end of turn."""
    in_answer: list[int]
    """1 for each token of the answer and its end of turn."""


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(ids, in_answer, mask), each [examples, longest]."""


def new_model(tokenizer: Qwen2Tokenizer, seed: int, heads: int = 4) -> PreTrainedModel:
    """Return a Qwen2 model with random weights, with 4 heads of about a million parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=40 * heads,
        intermediate_size=224 * heads,
        num_hidden_layers=2,  # the minimum for copying; a wide model learns to copy in half the time of a deep one
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),  # build_tokenizer sets both
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def encode(tokenizer: Qwen2Tokenizer, demonstration: Demonstration) -> Example:
    """Encode the prompt, then the answer and its end of turn; the texts of one message one by one, as the engine
    does."""
    messages, tools = list(demonstration.messages), list(demonstration.tools) or None
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
    # cast: with `return_dict=False` the template gives token ids
    prompt = cast(list[int], tokenizer.apply_chat_template(messages, **options))
    prompt = [*prompt, *(i for text in demonstration.begun for i in tokenizer.encode(text, add_special_tokens=False))]
    end = [] if demonstration.goes_on else [tokenizer.eos_token_id]
    answer = cast(list[int], [*tokenizer.encode(demonstration.answer, add_special_tokens=False), *end])
    return Example([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


def batches(examples: Sequence[Example], size: int, pad: int, seed: int) -> Iterator[Batch]:
    """Yield endless shuffled batches of `size` examples of similar length. Needs at least `size` examples."""
    order = torch.Generator().manual_seed(seed)
    pieces = min(16, len(examples) // size)
    while True:
        shuffled = torch.randperm(len(examples), generator=order).tolist()
        # Sorting by length within a small pool saves padding and keeps the order random.
        for start in range(0, len(shuffled) - pieces * size + 1, pieces * size):
            pool = sorted(shuffled[start : start + pieces * size], key=lambda i: len(examples[i][0]))
            for piece in torch.randperm(pieces, generator=order).tolist():
                yield _padded([examples[i] for i in pool[piece * size : (piece + 1) * size]], pad)


def _padded(examples: Sequence[Example], pad: int) -> Batch:
    lengths = torch.tensor([len(example.ids) for example in examples])
    longest = int(lengths.max())
    ids = torch.tensor([example.ids + [pad] * (longest - len(example.ids)) for example in examples])
    in_answer = torch.tensor([example.in_answer + [0] * (longest - len(example.ids)) for example in examples])
    return ids, in_answer, torch.arange(longest)[None] < lengths[:, None]


def mean_loss(
    model: torch.nn.Module, ids: torch.Tensor, in_answer: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy in nats per token, over the answers and over the prompts."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    answer = in_answer[:, 1:].flatten().float()
    prompt = mask[:, 1:].flatten().float() - answer
    return (loss * answer).sum() / answer.sum(), (loss * prompt).sum() / prompt.sum()


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices, in float32.

    torch.optim.Muon orthogonalizes in bfloat16, for which most processors have no instructions: there it took nine
    tenths of a warm start. The options are its defaults, except three Newton-Schulz steps and a decay of 0.01.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter], lr: float):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                update = orthogonalized(matrix.grad.lerp(momentum, 0.95))
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * 0.01)
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix [rows, columns] with all singular values near 1, by a quintic Newton-Schulz iteration."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(3):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def warm_start(
    model: torch.nn.Module,
    examples: Sequence[Example],
    *,
    pad: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Train on the examples and return the mean loss of the answers over the last tenth of the steps.

    Prompts count at half weight: later prompts repeat the problem and the plan, from which a small model learns to
    copy.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        # with Muon the model learns to copy numbers in half of AdamW's steps
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.95), fused=True),
    ]
    rise = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / rise, (steps - step) / (steps - rise)))
        for o in optimizers
    ]
    losses = []
    model.train()
    for step, batch in zip(range(steps), batches(examples, batch_size, pad, seed), strict=False):
        answer_loss, prompt_loss = mean_loss(model, *batch)
        model.zero_grad()
        (answer_loss + 0.5 * prompt_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for update in (*optimizers, *schedules):
            update.step()
        losses.append(answer_loss.item())
        if (step + 1) % 100 == 0:
            print(f"warm start {step + 1}/{steps}: loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def check_reload(folder: Path, tokenizer: Qwen2Tokenizer, demonstrations: list[Demonstration]) -> None:
    """Raise RuntimeError if the saved tokenizer encodes differently: on loading, transformers replaces parts of it (the
    pre-tokenizer) according to the model type."""
    reloaded = AutoTokenizer.from_pretrained(folder)
    for demonstration in demonstrations:
        if encode(reloaded, demonstration) != encode(tokenizer, demonstration):
            raise RuntimeError(f"{folder}: the tokenizer encodes differently after reloading: {demonstration.answer!r}")


def digest(demonstrations: Sequence[Demonstration], segments: Sequence[str]) -> str:
    """Return a hash of prompts, answers and segments."""
    return hashlib.sha256(repr((list(demonstrations), list(segments))).encode()).hexdigest()


def check_output(output: Path, stamp: Path) -> None:
    """Raise UserError if `output` has content that this command did not write."""
    empty = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not empty and not stamp.is_file():
        raise UserError(f"--output {output} exists and was not made by this command; delete it or pass another folder")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workflow", required=True, type=Path)
    parser.add_argument("--teacher", required=True, help="file.py:Class, a recipe.tiny.dialogue.Teacher")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=4096, help="number of training problems to demonstrate")
    parser.add_argument("--test_size", type=int, default=64, help="size of the test split, whose problems are left out")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--dialect", choices=DIALECTS, default="qwen", help="how the chat template marks turns")
    parser.add_argument("--vocab_size", type=int, default=640, help="without texts that all dialogues share")
    parser.add_argument("--heads", type=int, default=4, help="of 40 dimensions; the model is as wide as all of them")
    args = parser.parse_args(argv)
    stamp = args.output / "recipe.json"
    recipe = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    started = time.monotonic()
    try:
        check_output(args.output, stamp)
        teacher: Teacher = load_object(args.teacher, args.workflow)(load_workflow(args.workflow), args.seed)
        segments: Sequence[str] = getattr(teacher, "segments", ())
        problems = teacher.problems(args.problems, args.test_size)
        lessons = (demonstration for problem in problems for demonstration in teacher.teach(problem))
        first = list(islice(lessons, 256))  # enough to tell other prompts; all of them can take 15 s
        recipe["demonstrations"] = digest(first, segments)
        if stamp.is_file():
            if json.loads(stamp.read_text()) == recipe:
                print(f"{args.output} already exists")
                return 0
            print(f"{args.output}: the prompts, the teacher or the options have changed; making the model again")
        demonstrations = [*first, *lessons]
        if len(demonstrations) < args.batch_size:
            raise UserError(
                f"--problems {args.problems} make {len(demonstrations)} demonstrations, fewer than --batch_size "
                f"{args.batch_size}; ask for more problems or a smaller batch"
            )
    except (UserError, Fault) as error:  # a fault of a hook, env or tool would recur, and there is no run to go on
        text = describe(error.record()) if isinstance(error, Fault) else error
        print(f"error: {text}", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    dialect = DIALECTS[args.dialect]
    tokenizer = build_tokenizer(demonstrations[:3000], args.vocab_size, segments=segments, dialect=dialect)
    examples = [encode(tokenizer, demonstration) for demonstration in demonstrations]
    model = new_model(tokenizer, args.seed, args.heads)
    loss = warm_start(
        model,
        examples,
        pad=cast(int, tokenizer.pad_token_id),
        steps=args.steps,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    check_reload(partial, tokenizer, demonstrations[:300])
    (partial / "recipe.json").write_text(json.dumps(recipe))
    shutil.rmtree(args.output, ignore_errors=True)
    os.replace(partial, args.output)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.output}: {parameters:.2f}M parameters, loss {loss:.3f}, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
