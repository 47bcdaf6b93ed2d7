from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy.encoder import LastHiddenState, TextEncoder, start_encoder
from recipe.dag.policy.placement import Pool
from recipe.dag.train.models import find_models

LETTERS = "abcdefghij"


@pytest.fixture(scope="module")
def reader(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with a tokenizer that has a token for each letter."""
    folder = tmp_path_factory.mktemp("reader") / "model"
    shutil.copytree(tiny_model, folder)
    vocabulary = {"<|endoftext|>": 0, **{letter: 5 + place for place, letter in enumerate(LETTERS)}}
    Qwen2Tokenizer(vocabulary, [], unk_token=None, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(reader) -> TextEncoder:
    return TextEncoder(str(reader), chunk=4)


def states_of(tiny_model, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


def test_a_text_is_its_last_tokens_hidden_state_averaged_over_pieces(encoder, tiny_model):
    found = encoder(["abc", "abcde"])
    torch.testing.assert_close(found[0], states_of(tiny_model, [5, 6, 7])[-1])
    pieces = torch.stack([states_of(tiny_model, [5, 6, 7, 8])[-1], states_of(tiny_model, [9])[-1]])
    torch.testing.assert_close(found[1], pieces.mean(0))
    assert found.dtype == torch.float32 and not found.requires_grad


def test_padding_is_not_read_and_the_same_texts_give_the_same_bits(encoder):
    texts = ["a", "bcd", "", "efghijfe"]
    together = encoder(texts)
    torch.testing.assert_close(together, torch.cat([encoder([text]) for text in texts]))
    assert torch.equal(together, encoder(texts)) and torch.isfinite(together).all()
    assert not torch.equal(together[0], together[1])


def test_what_cannot_be_loaded_or_read_is_told(tiny_model, tmp_path):
    with pytest.raises(UserError, match="mixer.encoder.chunk=257 exceeds the context length of .* .256 tokens."):
        TextEncoder(str(tiny_model), chunk=257)
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    (broken / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match="algorithm.mixer.encoder.model: .*broken cannot be loaded"):
        TextEncoder(str(broken), chunk=4)


def test_without_a_gpu_it_lives_in_this_process(tiny_model):
    assert isinstance(start_encoder(Pool(None, 1), str(tiny_model), platform="cpu", chunk=4), TextEncoder)


WORKFLOW = """\
dag_id: team
agents: [{{name: judge, policy: fixed}}, {{name: solver, policy: main}}]
policies: {{fixed: {{model: {{path: {other}}}, frozen: true}}, main: {{model: {{path: {model}}}}}}}
algorithm: {{estimator: {estimator}}}
nodes:
  - {{id: judge, agent: judge}}
  - {{id: solve, agent: solver, after: judge}}
  - {{id: reward, reward: score.py:score, after: solve}}
"""


def test_the_default_is_the_first_trained_policys_model(tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    (tmp_path / "score.py").write_text("def score(episode):\n    return {}\n")

    def encoder_of(estimator: str) -> str | None:
        text = WORKFLOW.format(model=tiny_model, other=other, estimator=estimator)
        (tmp_path / "team.yaml").write_text(text)
        return find_models(load_workflow(tmp_path / "team.yaml")).encoder

    assert encoder_of("grpo") is None
    assert encoder_of("vdn") == str(tiny_model)
    assert encoder_of(f"vdn, mixer: {{encoder: {{model: {{path: {other}}}}}}}") == str(other)
    with pytest.raises(UserError, match="algorithm.mixer.encoder.model.path: /nowhere is not a model directory"):
        encoder_of("vdn, mixer: {encoder: {model: {path: /nowhere}}}")


def sums(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """States [B, L, 1] of a causal model: at each token the sum so far, of an id 99 that no text has where padded."""
    return torch.where(mask == 1, ids, 99).cumsum(1).unsqueeze(-1).double()


def digits(text: str) -> list[int]:
    return [int(c) for c in text]


def test_encoder_reads_all_of_a_long_text():
    encoder = LastHiddenState(digits, sums, chunk=2)
    assert encoder(["1", "12", "12345"]).tolist() == [[1.0], [3.0], [pytest.approx((3 + 7 + 5) / 3)]]
    with pytest.raises(ValueError, match="chunk: 0"):
        LastHiddenState(digits, sums, chunk=0)


@pytest.mark.parametrize("batch_tokens", [1, 4, 7, 1000])
def test_which_texts_share_a_batch_changes_no_state(batch_tokens):
    seen = []

    def hidden(ids, mask):
        seen.append(tuple(ids.shape))
        return sums(ids, mask)

    texts = ["1", "1234", "98", "", "777777777", "1"]
    encoder = LastHiddenState(lambda text: digits(text) or [0], hidden, chunk=4, batch_tokens=batch_tokens)
    alone = [encoder([text])[0].tolist() for text in texts]
    seen.clear()
    assert encoder(texts).tolist() == alone
    assert all(rows == 1 or rows * length <= batch_tokens for rows, length in seen)
    assert sum(rows for rows, _ in seen) == 8
