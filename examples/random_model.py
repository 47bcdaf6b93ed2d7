"""A Qwen2-architecture checkpoint with random weights and Qwen2.5's size of vocabulary, for throughput and plumbing.

    python examples/random_model.py OUT [--shape 0.5b|1.5b|3b|7b|tiny] [--vocab_size 4096]

Random weights rarely stop by themselves, so every generation runs to its limit: good for timing, useless for answers.
Time and memory on a GPU depend on the vocabulary, so 151936 is the default. All but 4096 of its tokens are made of
Greek letters and put together in one way: what a random model says is as many tokens when the next agent reads it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads: Qwen2.5's
    "tiny": (128, 512, 4, 4, 2),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


LATIN = 4096
"""Tokens that are learned from English and Python."""
GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
ROOT = Path(__file__).resolve().parents[1]


def texts() -> Iterator[str]:
    for file in sorted([*ROOT.glob("README.md"), *ROOT.glob("recipe/*/README.md"), *ROOT.glob("recipe/*/prompts.py")]):
        yield file.read_text(encoding="utf-8")
    yield from (f"{a} plus {b} is {a + b}; def f(x): return x + {a}\n" for a in range(99) for b in range(99))


def greek_merges() -> Iterator[tuple[str, str]]:
    """Yield byte-level merges, in order: letters, pairs of letters, then words of one, two and three pairs.

    A pair is a letter of GREEK's first half and one of its second, so that a word has one way to be put together.
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
    vocabulary, merges = dict(model["vocab"]), [tuple(merge) for merge in model["merges"]]
    for first, second in greek_merges():
        if len(vocabulary) >= size:
            break
        vocabulary.setdefault(first + second, len(vocabulary))
        merges.append((first, second))
    tokenizer = Qwen2Tokenizer(vocabulary, merges, unk_token=None, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--vocab_size", type=int, default=151936, help=f"of model and tokenizer, {LATIN} or more")
    args = parser.parse_args(argv)
    if args.vocab_size < LATIN:
        parser.error(f"--vocab_size {args.vocab_size}: must be {LATIN} or more")
    tokenizer = tokenizer_of(args.vocab_size)
    hidden, intermediate, layers, heads, kv_heads = SHAPES[args.shape]
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
