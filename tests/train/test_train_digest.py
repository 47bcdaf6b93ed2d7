from __future__ import annotations

import json

import pytest

from recipe.dag.train import digest
from recipe.dag.train.digest import file_digest, items_digest, model_digest


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (folder / "tokenizer.json").write_text("[]")
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_configuration_weights_and_tokenizer_make_a_model(model, name):
    before = model_digest(str(model))
    (model / "README.md").write_text("of no account")
    assert model_digest(str(model)) == before
    (model / name).write_bytes((model / name).read_bytes()[:-1] + b"x")
    assert model_digest(str(model)) != before


def test_a_file_more_or_less_is_another_model(model):
    before = model_digest(str(model))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(str(model)) != before


def test_a_model_that_was_moved_is_the_same(model, tmp_path):
    before = model_digest(str(model))
    assert model_digest(str(model.rename(tmp_path / "moved"))) == before


def test_a_large_file_is_sampled_from_its_first_to_its_last_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "FULL", 1000)
    monkeypatch.setattr(digest, "BLOCK", 100)
    path, data = tmp_path / "weights", bytearray(50_000)
    path.write_bytes(data)
    digests = {file_digest(path)}
    for position in (0, 49_999):
        changed = bytearray(data)
        changed[position] = 1
        path.write_bytes(changed)
        digests.add(file_digest(path))
    path.write_bytes(data + b"\0")
    assert len(digests | {file_digest(path)}) == 4
    path.write_bytes(bytes(byte ^ 1 for byte in data))  # as training changes weights: all of them
    assert file_digest(path) not in digests
    path.write_bytes(data[:1000])
    whole = file_digest(path)
    monkeypatch.setattr(digest, "FULL", 2000)
    assert file_digest(path) == whole


def test_a_hub_name_is_the_commit_that_the_cache_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / "snapshots" / "abc123" / file)
    )
    assert model_digest("org/model") == "abc123"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    assert model_digest("org/model") == ""


def test_samples_count_by_what_they_hold_and_their_order():
    samples = [{"prompt": [{"role": "user", "content": str(i)}], "ground_truth": "1"} for i in range(3)]
    assert items_digest(samples) == items_digest(json.loads(json.dumps(samples)))
    assert items_digest(samples) != items_digest(samples[::-1])
    assert items_digest(samples) != items_digest([*samples[:2], {**samples[2], "ground_truth": "2"}])
