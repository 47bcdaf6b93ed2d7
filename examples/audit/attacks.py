"""Attacks of your own, for `verl-dag audit --attacks FILE`: a text, or a function of the sample that returns one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def every_digit(sample: Mapping[str, Any]) -> str:
    """Write the problem, and then every number up to 99."""
    return "\n".join([sample["prompt"][-1]["content"], *map(str, range(100))])


ATTACKS = {"all numbers": " ".join(map(str, range(1000))), "question and numbers": every_digit}
