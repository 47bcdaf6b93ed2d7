from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples import random_model


@pytest.fixture(scope="module")
def full():
    return random_model.tokenizer_of(151936)


def test_the_vocabulary_is_qwens_unless_another_is_asked_for(tmp_path, capsys):
    random_model.main([str(tmp_path), "--shape", "tiny", "--vocab_size", "6000"])
    assert "parameters" in capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == 6000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 6000 and tokenizer.eos_token == "<|im_end|>"
    with pytest.raises(SystemExit):
        random_model.main([str(tmp_path), "--vocab_size", "100"])


@pytest.mark.parametrize(("shape", "head"), [("tiny", []), ("tiny", ["--untied"]), ("qwen3-tiny", [])])
def test_generations_stop_after_so_many_tokens_on_average(tmp_path, shape, head):
    random_model.main([str(tmp_path), "--shape", shape, "--vocab_size", "5000", "--mean_tokens", "10", *head])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == ("qwen3" if shape.startswith("qwen3") else "qwen2")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (not head)
    torch.manual_seed(0)
    prompts = torch.randint(10, 5000, (256, 5))
    sampling = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 100}
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling)
    lengths = (out[:, 5:] != model.config.pad_token_id).sum(1).float()
    assert lengths.mean() == pytest.approx(10, rel=0.25) and lengths.std() == pytest.approx(10, rel=0.35)
    with pytest.raises(SystemExit):
        random_model.main([str(tmp_path), "--mean_tokens", "1"])


def test_what_a_random_model_says_is_about_as_many_tokens_when_it_is_read_again(full):
    assert len(full) == 151936
    ids = random.Random(0).choices(range(3, 151936), k=2000)
    again = full.encode(full.decode(ids), add_special_tokens=False)
    assert len(again) == pytest.approx(len(ids), rel=0.15)


def test_prompts_in_english_are_not_spelled_out_in_letters(full):
    text = "Plan how to solve this with a short Python program, then check the answer."
    assert len(full.encode(text)) < len(text) / 2.5
    assert full.decode(full.encode(text)) == text
