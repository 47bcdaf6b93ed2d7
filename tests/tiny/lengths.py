"""Lengths of a teacher's dialogues, which those of a recipe's config/tiny_cpu.yaml have to hold."""

from __future__ import annotations

from collections.abc import Sequence

from recipe.tiny.build import encode
from recipe.tiny.dialogue import Demonstration
from recipe.tiny.tokenizer import build_tokenizer


def check_lengths(demonstrations: Sequence[Demonstration], prompt: int, answer: int, **options) -> None:
    """`prompt`, `answer`: the most tokens. `options`: of the tokenizer, which learns from the first 3,000."""
    tokenizer = build_tokenizer(demonstrations[:3000], **options)
    for ids, in_answer in (encode(tokenizer, demonstration) for demonstration in demonstrations):
        assert len(ids) - sum(in_answer) <= prompt and sum(in_answer) <= answer
