"""Make the tiny model: architecture, tokenizer, and a warm start on a careless teacher's dialogues.

    python -m recipe.tiny.build --workflow FILE --teacher FILE:CLASS --output DIR [--seed 0]

Invariant: the same arguments give the same model, and the output folder appears only when it is complete. It is a Qwen2
checkpoint like any other: nothing downstream knows how it was made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2Tokenizer

from recipe.dag.errors import UserError
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.user_code import load_object
from recipe.tiny.dialogue import Demonstration, Teacher
from recipe.tiny.tokenizer import build_tokenizer

MAX_LENGTH = 1024


def new_model(tokenizer: Qwen2Tokenizer, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=160,
        intermediate_size=896,
        num_hidden_layers=2,  # the fewest that can copy; wide rather than deep learns that in half the time
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def encode(tokenizer: Qwen2Tokenizer, d: Demonstration) -> tuple[list[int], list[int]]:
    """(ids, in_answer): the prompt, then the answer and its end of turn."""
    prompt = tokenizer.apply_chat_template(list(d.messages), add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(d.answer, add_special_tokens=False) + [tokenizer.eos_token_id]
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


def batches(examples: list[tuple[list[int], list[int]]], size: int, pad: int, seed: int):
    """Endless shuffled batches of about equally long examples: (ids, in_answer, mask), each [size, longest]. There must
    be `size` examples or more."""
    order = torch.Generator().manual_seed(seed)
    pieces = min(16, len(examples) // size)
    while True:
        shuffled = torch.randperm(len(examples), generator=order).tolist()
        # neighbours in length share a batch, in pools small enough to keep the order random
        for start in range(0, len(shuffled) - pieces * size + 1, pieces * size):
            pool = sorted(shuffled[start : start + pieces * size], key=lambda i: len(examples[i][0]))
            for piece in torch.randperm(pieces, generator=order).tolist():
                chosen = [examples[i] for i in pool[piece * size : (piece + 1) * size]]
                lengths = torch.tensor([len(ids) for ids, _ in chosen])
                longest = int(lengths.max())
                ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in chosen])
                in_answer = torch.tensor([marks + [0] * (longest - len(marks)) for _, marks in chosen])
                yield ids, in_answer, torch.arange(longest)[None] < lengths[:, None]


def mean_loss(
    model, ids: torch.Tensor, in_answer: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy in nats per token, over the answers and over the prompts."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    answer = in_answer[:, 1:].flatten().float()
    prompt = mask[:, 1:].flatten().float() - answer
    return (loss * answer).sum() / answer.sum(), (loss * prompt).sum() / prompt.sum()


def warm_start(model, examples, *, pad: int, steps: int, batch_size: int, learning_rate: float, seed: int) -> float:
    """Supervised learning; returns the answers' mean loss over the last tenth of the steps.

    The prompts count too, at half weight: the later roles' prompts repeat the problem and the plan, which is where a
    model this small learns to copy."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        # learns to copy numbers in half of AdamW's steps
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, ns_steps=3),
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
    """Loading a tokenizer may replace parts of it (its pre-tokenizer, by model type); the model must see what it
    learned."""
    reloaded = AutoTokenizer.from_pretrained(folder)
    for d in demonstrations:
        if encode(reloaded, d) != encode(tokenizer, d):
            raise RuntimeError(f"{folder}: the tokenizer encodes differently once reloaded: {d.answer!r}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workflow", required=True, type=Path)
    parser.add_argument("--teacher", required=True, help="file.py:Class, a recipe.tiny.dialogue.Teacher")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=4096, help="of the training split, to demonstrate")
    parser.add_argument("--test_size", type=int, default=64, help="of the test split, kept out")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args(argv)
    recipe = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    stamp = args.output / "recipe.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        print(f"{args.output} is there already")
        return 0
    started = time.monotonic()
    try:
        if args.output.exists() and not (stamp.is_file() or args.output.is_dir() and not any(args.output.iterdir())):
            raise UserError(
                f"--output {args.output} is there and was not made by this command; name another folder, or remove it"
            )
        workflow = load_workflow(args.workflow)
        teacher: Teacher = load_object(args.teacher, args.workflow)(workflow, args.seed)
        problems = teacher.problems(args.problems, args.test_size)
        demonstrations = [d for problem in problems for d in teacher.teach(problem)]
        if len(demonstrations) < args.batch_size:
            raise UserError(
                f"--problems {args.problems} make {len(demonstrations)} demonstrations, fewer than --batch_size "
                f"{args.batch_size}; ask for more problems or a smaller batch"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    tokenizer = build_tokenizer(demonstrations[:3000])
    examples = [encode(tokenizer, d) for d in demonstrations]
    model = new_model(tokenizer, args.seed)
    loss = warm_start(
        model,
        examples,
        pad=tokenizer.pad_token_id,
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
