"""Separates code and tool calls in a model's text.

Invariant: pure. No tool call, program or answer is ever taken from a thought (types/thoughts.py).
"""

from __future__ import annotations

import re
import textwrap

from recipe.dag.types.thoughts import after_thinking

# A fence starts a line, indented or not. A block without a closing fence extends to the end of the text.
_PYTHON = re.compile(
    r"^[ \t]*```[ \t]*(?:python[\d.]*|py3?)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call without a closing tag extends to the end of the text."""


def python_blocks(text: str) -> list[str]:
    """Return the code of each fenced Python block, without common indentation."""
    return [textwrap.dedent(body) for body in _PYTHON.findall(text)]


def prose(text: str) -> str:
    """Return the text outside thoughts, tool calls and Python blocks."""
    return _PYTHON.sub("\n", TOOL_CALL.sub("\n", after_thinking(text)))
