"""The executor's code, and what the verifier is told about its run.

Invariant: both are pure functions of what the model wrote and what the tool returned.
"""

from __future__ import annotations

import re
import textwrap

STREAM_CHARS = 512
"""How much of each stream the execution log shows."""

EMPTY_CODE = "empty_code"

# A fence without its closing one reaches to the end: the generation was cut off.
_BLOCK = re.compile(
    r"```[ \t]*(?:(?P<python>python3?|py)\b|(?P<other>[\w+#.-]+)(?=[ \t]*(?:\n|\Z)))?(?P<body>.*?)(?:```|\Z)",
    re.DOTALL | re.IGNORECASE,
)


def extract_code(text: str) -> str:
    """The first Python block, else the first block without a language, else the whole text; "" if there is no code."""
    blocks = list(_BLOCK.finditer(text))
    chosen = next((block for block in blocks if block["python"]), None) or next(
        (block for block in blocks if not block["other"]), None
    )
    return textwrap.dedent(text if chosen is None else chosen["body"].strip("\n")).strip()


def execution_log(code: str, status: str, stdout: str, stderr: str) -> str:
    """Code in full, status, and the head of each stream."""
    sections = {
        "Code": code,
        "Status": status,
        "Stdout": stdout[:STREAM_CHARS].rstrip(),
        "Stderr": stderr[:STREAM_CHARS].rstrip(),
    }
    return "\n".join(f"{title}:\n{body or '[none]'}" for title, body in sections.items())
