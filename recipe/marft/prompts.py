"""Prompts of reasoner and actor, and the rendering of templates.

Invariant: rendering replaces each `${name}` of the known fields once and changes nothing else: LaTeX, dollar signs,
braces and backslashes of a template are kept, and inserted values are not searched for fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from recipe.dag.core.errors import UserError

SYSTEMS = {
    "math": "You solve mathematics problems in a team of two.",
    "code": "You solve programming problems in a team of two.",
}

REASONERS = {
    "math": """\
${prompt}

Work out how to solve this, step by step. A colleague will carry your steps out; leave the final answer to them.""",
    "code": """\
${prompt}

Work out an algorithm for this, step by step, with the special cases to watch for. A colleague will write the program \
from your steps; write no program yourself.""",
}

ACTORS = {
    "math": """\
${problem}

${feedback}A colleague's steps:
${reasoning}

Carry the steps out and correct what is wrong in them. Finish with the final answer in \\boxed{}.""",
    "code": """\
${problem}

${feedback}A colleague's steps:
${reasoning}

Write the program. Reply with one ```python block that holds all of it.""",
}

EARLIER = "An earlier attempt:\n"

_FIELD = re.compile(r"\$\{([A-Za-z_]\w+)\}")


def render(template: str, fields: Mapping[str, str], where: str = "pre_chat_template") -> str:
    """Return `template` with each `${name}` in `fields` replaced by its value.

    Raises UserError for any other `${word}` of two or more letters; `${x}`, `$x$`, `$$` and `$5` are kept, since they
    are LaTeX or prices. `where` is the option that the message names.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            known = ", ".join(f"${{{name}}}" for name in fields)
            raise UserError(f"{where}: unknown field {match[0]}; the fields here are {known}")
        return fields[match[1]]

    return _FIELD.sub(value, template)
