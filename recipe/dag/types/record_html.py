"""An episode's record as HTML, for notebooks.

Invariant: whatever a record holds (texts of models, tools and data) is escaped, so that a browser shows it and never
interprets it. Long texts are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipe.dag.core.counted import counted
from recipe.dag.core.printable import printable

if TYPE_CHECKING:
    from jinja2 import Template

SHOWN = 1000
"""Characters of each text."""
_TEMPLATE = """\
<div><b>{{ headline }}</b>
<pre style="white-space: pre-wrap">{{ problem | shown }}</pre>
<table>
<tr><th>call</th><th style="text-align: left">text</th><th>reward</th></tr>
{%- for call in episode.calls %}
<tr><td>{{ call.node | shown }}{% if call.agent != call.node %} ({{ call.agent | shown }}){% endif %}
turn {{ call.turn }}
{%- if call.round %}, round {{ call.round }}{% endif %}</td>
<td style="text-align: left"><pre style="white-space: pre-wrap">{{ (call.completion or call.text) | shown }}</pre>
{%- for result in call.tool_results %}
<pre style="white-space: pre-wrap">{{ result.name | shown }}: {{ result.status }}
{{ result.text | shown }}</pre>
{%- endfor %}</td>
<td>{% if call.reward is not none %}{{ "%+.2f" | format(call.reward) }}{% endif %}</td></tr>
{%- endfor %}
</table>
{%- if episode.fault %}
<p>ended by a {{ episode.fault.boundary }} fault: {{ episode.fault.message | shown }}</p>
{%- endif %}
</div>"""


def html_of(episode: Mapping[str, Any]) -> str:
    """Return a table of the calls of `Episode.to_json()` with their texts, tool results and rewards."""
    prompt = episode["sample"].get("prompt")
    problem = "\n\n".join(str(m.get("content", "")) for m in prompt) if isinstance(prompt, list) else prompt or ""
    return _template().render(episode=episode, problem=problem, headline=_headline(episode))


def _headline(episode: Mapping[str, Any]) -> str:
    outcome, count = episode["outcome"], len(episode["calls"])
    graded = "not graded" if outcome is None else f"outcome {outcome:g}"
    calls = f"{counted(count, 'call')}, {episode['seconds']:.1f} s"
    return printable(f"sample {episode['uid']}, episode {episode['index']}: {graded}, {calls}")


def _shown(text: Any) -> str:
    text = printable(str(text))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... {counted(len(text) - SHOWN, 'more character')}"


@functools.cache
def _template() -> Template:
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.filters["shown"] = _shown
    return environment.from_string(_TEMPLATE)
