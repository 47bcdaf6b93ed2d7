"""A Qwen2-architecture checkpoint with random weights and a small tokenizer, for throughput and plumbing.

    python examples/random_model.py OUT [--shape 0.5b|1.5b|3b|7b|tiny] [--vocab_size 151936]

Random weights rarely stop by themselves, so every generation runs to its limit: good for timing, useless for answers.
Time and memory on a GPU depend on the vocabulary: 151936 is Qwen2.5's. Ids beyond the tokenizer's decode to nothing.
"""

from __future__ import annotations

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--vocab_size", type=int, default=4096, help="of the model, at least the tokenizer's 4096")
    args = parser.parse_args()
    if args.vocab_size < 4096:
        parser.error(f"--vocab_size {args.vocab_size}: the tokenizer has 4096")

    blank = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    blank.train_from_iterator(
        (f"{a} plus {b} is {a + b}; def f(x): return x + {a}\n" for a in range(99) for b in range(99)), trainer
    )
    tokenizer = Qwen2Tokenizer(blank.get_vocab(), [], unk_token=None, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    tokenizer.chat_template = CHAT_TEMPLATE
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
