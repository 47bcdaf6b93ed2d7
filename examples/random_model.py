"""Write a checkpoint with random weights and Qwen2.5's vocabulary size, to measure throughput and test plumbing.

    python examples/random_model.py OUT [--shape 0.5b|1.5b|3b|7b|qwen3-4b|...] [--untied] [--mean_tokens 300]

A random model rarely stops by itself, so every generation runs to its limit. `--mean_tokens` makes generations stop
after that many tokens on average (lengths are geometric), if agents sample at `--temperature`.
Time and memory on a GPU depend on the vocabulary, so its default size is Qwen2.5's, 151936. All but 4096 of the tokens
consist of Greek letters and can be split in only one way, so that the next agent reads a text as the same number of
tokens as were sampled. The shape tiny is for the CPU: a server of SGLang 0.5.12 with it ends with a CUDA error where it
frees its memory for an update; 0.5b is the smallest that a GPU trains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer, Qwen3Config

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads: Qwen2.5's and Qwen3's
    "tiny": (128, 512, 4, 4, 2),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "qwen3-4b": (2560, 9728, 36, 32, 8),
    "qwen3-tiny": (128, 512, 4, 4, 2),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


LATIN = 4096
"""Number of tokens that are learned from English and Python."""
CONSTANT = 50.0
"""Value of the residual stream's first dimension, about as large as the norm of all the others."""
GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
ROOT = Path(__file__).resolve().parents[1]


def texts() -> Iterator[str]:
    for file in sorted([*ROOT.glob("README.md"), *ROOT.glob("recipe/*/README.md"), *ROOT.glob("recipe/*/prompts.py")]):
        yield file.read_text(encoding="utf-8")
    yield from (f"{a} plus {b} is {a + b}; def f(x): return x + {a}\n" for a in range(99) for b in range(99))


def greek_merges() -> Iterator[tuple[str, str]]:
    """Yield byte-level merges, in order: letters, pairs of letters, then words of one, two and three pairs.

    A pair consists of a letter from each half of GREEK, so that a word can be split in only one way.
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [to_bytes.pre_tokenize_str(letter)[0][0] for letter in GREEK]
    yield from ((letter[0], letter[1]) for letter in letters)
    half = len(letters) // 2
    yield from itertools.product(letters[:half], letters[half:])
    pairs = ["".join(pair) for pair in itertools.product(letters[:half], letters[half:])]
    for length in range(3):
        for start in itertools.product(pairs, repeat=length):
            yield from (("".join(["Ġ", *start]), pair) for pair in pairs)


def tokenizer_of(size: int) -> Qwen2Tokenizer:
    """Return a tokenizer of `size` tokens, LATIN or more."""
    learned = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=LATIN,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator(texts(), trainer)
    model = json.loads(learned.to_str())["model"]
    vocabulary = dict(model["vocab"])
    merges: Any = [tuple(merge) for merge in model["merges"]]  # transformers' annotations know neither pairs nor None
    for first, second in greek_merges():
        if len(vocabulary) >= size:
            break
        vocabulary.setdefault(first + second, len(vocabulary))
        merges.append((first, second))
    special: dict[str, Any] = {"unk_token": None, "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    tokenizer = Qwen2Tokenizer(vocabulary, merges, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def stop_after(model: Any, tokens: int, eos: int, temperature: float) -> None:
    """Give `eos` the probability 1 / `tokens` after any text, when sampling at `temperature`.

    `model`: a Qwen2 or Qwen3 model.

    One dimension of the residual stream becomes the same constant for every token. No layer reads or writes it, and the
    final norm scales it to the difference that the logit of `eos` needs.
    """
    inner, embeddings = model.model, model.get_input_embeddings().weight
    embeddings[:, 0] = CONSTANT
    embeddings[eos] = 0
    embeddings[eos, 0] = 2 * CONSTANT
    for layer in inner.layers:
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
    ids = torch.randint(eos + 1, len(embeddings), (4, 128), device=embeddings.device)
    hidden = inner(ids).last_hidden_state.float().flatten(0, 1)
    constant, rest = hidden[:, 0].mean(), hidden[:, 1:]
    others = torch.cat([(rest @ part[:, 1:].float().T) / temperature for part in embeddings.split(16384)], dim=1)
    # p(eos) = 1 / tokens means that its logit is log(sum exp(others)) - log(tokens - 1)
    logit = temperature * (others.logsumexp(dim=1).mean() - math.log(tokens - 1))
    inner.norm.weight[0] = logit / (CONSTANT * constant)
    model.get_output_embeddings().weight.copy_(embeddings)  # a head of its own must score tokens as this one does


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--untied", action="store_true", help="give the head its own weights, as 7b always has them")
    parser.add_argument("--vocab_size", type=int, default=151936, help=f"size of the vocabulary, {LATIN} or more")
    parser.add_argument("--mean_tokens", type=int, help="mean length of a generation, 2 or more; by default none stops")
    parser.add_argument("--temperature", type=float, default=0.8, help="temperature for which --mean_tokens holds")
    args = parser.parse_args(argv)
    if args.mean_tokens is not None and args.mean_tokens < 2:
        parser.error(f"--mean_tokens {args.mean_tokens}: must be 2 or more")
    if args.vocab_size < LATIN:
        parser.error(f"--vocab_size {args.vocab_size}: must be {LATIN} or more")
    tokenizer = tokenizer_of(args.vocab_size)
    eos = cast(int, tokenizer.convert_tokens_to_ids(SPECIAL[2]))  # a list only for a list of tokens
    hidden, intermediate, layers, heads, kv_heads = SHAPES[args.shape]
    family: Any = partial(Qwen3Config, head_dim=128) if args.shape.startswith("qwen3") else Qwen2Config
    config = family(
        vocab_size=args.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=args.shape != "7b" and not args.untied,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=cast(int, tokenizer.convert_tokens_to_ids(SPECIAL[0])),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    if args.mean_tokens:
        stop_after(model, args.mean_tokens, eos, args.temperature)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
