"""The sections of a rendered template, for coaches that judge by rule.

Invariant: what an agent wrote, now or earlier, is never a heading. Templates indent the texts that they insert
(`{{ agent_output | indent(2, true) }}`), and a heading starts its line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_INDENT = re.compile(r"^  ", re.MULTILINE)


def sections(request: str, headings: Sequence[str], template: str) -> dict[str, str]:
    """Return heading -> text without its indentation.

    headings: those of the template, in order; in the request, `# ` comes before each
    template: its file, for the message

    Raises ValueError if one is missing.
    """
    texts: dict[str, str] = {}
    for heading, following in zip(headings, (*headings[1:], None), strict=True):
        _, mark, request = request.partition(f"\n# {heading}\n")
        if not mark:
            raise ValueError(f"the request has no section '# {heading}'; it must be {template}")
        text = request if following is None else request.partition(f"\n# {following}\n")[0]
        texts[heading] = _INDENT.sub("", text).strip()
    return texts
