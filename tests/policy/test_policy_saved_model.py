"""The model folder of a checkpoint, as other programs load it."""

from __future__ import annotations

import json

import pytest

from recipe.dag.policy.attention import VARLEN
from recipe.dag.policy.engine import forget_attention


@pytest.mark.parametrize(("saved", "kept"), [(VARLEN, None), ("sdpa", "sdpa")])
def test_only_an_attention_that_other_programs_know_stays_in_the_configuration(tmp_path, saved, kept):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2", "attn_implementation": saved}))
    forget_attention(file)
    configuration = json.loads(file.read_text())
    assert configuration.get("attn_implementation") == kept and configuration["model_type"] == "qwen2"


def test_a_checkpoint_without_a_model_folder_is_left_alone(tmp_path):
    forget_attention(tmp_path / "huggingface" / "config.json")
    assert list(tmp_path.iterdir()) == []
