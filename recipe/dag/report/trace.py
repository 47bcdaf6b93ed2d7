"""A recorded episode in a terminal: `verl-dag trace OUTPUT_DIR`.

Invariant: whatever a record holds (texts, names of tools, uids) is printed literally, interpreted neither by rich nor
by a terminal, and is legal in XML.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable
from recipe.dag.report.pass_at_k import SOLVED

COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
"""Border of each agent's calls, in the order in which the agents appear."""
MAX_CHARS = 4000
"""Length to which each text is cut unless all of it is asked for."""


def render(record: Mapping[str, Any], *, agent: str | None = None, full: bool = False) -> RenderableType:
    """Return one episode as panels: the problem, and for each call its text, tools, reward and advantage.

    agent: whose calls to show alone
    full: the whole texts, and with them prompts, the ground truth, the parts of the rewards, stop reasons, and
        cached tokens
    """
    record = _printable(record)
    agents = list(dict.fromkeys(call["agent"] for call in record["calls"]))
    shown = _Shown(None if full else MAX_CHARS, full, record.get("split", "train") == "train")
    parts: list[RenderableType] = [Text(_headline(record), style="bold"), _problem(record, shown)]
    parts += [Text(line, style="red") for line in _flag_lines(record)]
    for call in record["calls"]:
        if agent not in (None, call["agent"]):
            continue
        parts.append(_call(call, COLORS[agents.index(call["agent"]) % len(COLORS)], shown))
        if call.get("candidates"):
            parts += _siblings(call, record.get("dropped", ()), shown)
    for skip in record.get("skips", ()):
        parts.append(Text(f"turn {skip['turn']}: node {skip['node']} was skipped ({skip['reason']})", style="dim"))
    fault = record.get("fault")
    if fault:
        source = f"{fault.get('boundary', '')} fault in {fault.get('where', '')}"
        parts.append(Text(f"ended by a {source}: {fault.get('message', '')}", style="red"))
    return Group(*parts)


def _flag_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the run's monitors found in the episode, with the node of the call that it is about."""
    calls = [*record["calls"], *record.get("dropped", ())]
    for flag in record.get("flags", ()):
        node = "" if flag["call"] is None else f"{calls[flag['call']]['node']}: "
        yield f"flagged {flag['rule']}: {node}{flag['reason']}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """How much of a record to print."""

    max_chars: int | None
    full: bool
    trained: bool
    """Whether calls have an advantage, or should."""


def show(record: Mapping[str, Any], console: Console, *, agent: str | None = None, full: bool = False) -> None:
    console.print(render(record, agent=agent, full=full))


def write_svg(record: Mapping[str, Any], path: Path, *, agent: str | None = None, full: bool = False) -> None:
    """Write the episode as a picture, 100 columns wide. It loads no font: rich's style sheet names a CDN."""
    console = Console(record=True, width=100, file=io.StringIO())
    show(record, console, agent=agent, full=full)
    try:
        svg = console.export_svg(title=printable(_title(record)))
        path.write_text(re.sub(r"@font-face *{[^}]*}\s*", "", svg, count=2), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from error


def _headline(record: Mapping[str, Any]) -> str:
    outcome = record.get("outcome")
    graded = "not graded" if outcome is None else "solved" if outcome >= SOLVED else f"not solved (outcome {outcome:g})"
    where = f"step {record['step']}, {record.get('split', 'train')}, " if "step" in record else ""
    return f"{where}{_episode(record)}: {graded}, {record.get('seconds', 0.0):.1f} s"


def _title(record: Mapping[str, Any]) -> str:
    return f"{record['run']}, {_episode(record)}" if "run" in record else _episode(record)


def _episode(record: Mapping[str, Any]) -> str:
    fork = record.get("forked")
    of = f" (a fork of {fork['from']} at {fork['at']})" if fork else ""
    return f"sample {record['uid']}, episode {record['index']}{of}"


def _problem(record: Mapping[str, Any], shown: _Shown) -> Panel:
    prompt, truth = record["sample"].get("prompt", ""), record["sample"].get("ground_truth")
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    text = _literal(str(prompt), shown.max_chars)
    if shown.full and truth not in (None, ""):
        text.append(f"\n\nground truth: {truth}")
    return Panel(text, title="problem", title_align="left", box=box.SQUARE, style="dim")


def _call(call: Mapping[str, Any], color: str, shown: _Shown) -> Panel:
    body: list[RenderableType] = []
    max_chars, tools = shown.max_chars, call.get("tool_results", ())
    if shown.full and call.get("prompt_text"):
        body += [Text("prompt", style="bold"), _indented(call["prompt_text"], "  ", None), Text()]
    elif call.get("observation"):
        body += [Text("observation", style="bold"), _indented(call["observation"], "< ", max_chars), Text()]
    # the text is the last generation: tools that an earlier one asked for come before it
    before = [tool for tool in tools if 0 < tool.get("generation", 0) < call.get("generations", 0)]
    for tool in before:
        body += [*_tool(tool, max_chars), Text()]
    body.append(_literal(call.get("completion") or call["text"], max_chars))
    for tool in tools:
        if tool not in before:
            body += _tool(tool, max_chars)
    if shown.full:
        body += _more(call)
    name = call["node"] if call["node"] == call["agent"] else f"{call['node']} ({call['agent']})"
    where = "".join(f", {key} {call[key]}" for key in ("turn", "round") if call.get(key))
    return Panel(
        Group(*body),
        title=f"[bold]{escape(name)}[/bold]{where}",
        title_align="left",
        subtitle=", ".join(_numbers(call, shown)),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=color,
    )


def _more(call: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what the text that others read differs in from the model's, the parts of the reward, and cached tokens."""
    if call.get("completion"):
        yield Text("\npassed on", style="bold")
        yield _indented(call["text"], "  ", None)
    if parts := call.get("reward_parts"):
        yield Text(f"\nreward: {', '.join(f'{name} {part:+.2f}' for name, part in parts.items())}")
    if call.get("cached_tokens") is not None:
        yield Text(f"\nprompt: {call['cached_tokens']} of {counted(len(call['prompt_ids']), 'token')} cached")


def _siblings(call: Mapping[str, Any], dropped: Iterable[Mapping[str, Any]], shown: _Shown) -> Iterator[Panel]:
    """Yield the siblings of a candidate, which were not kept."""
    slot = [call[key] for key in ("node", "turn", "round")]
    for other in dropped:
        if [other[key] for key in ("node", "turn", "round")] == slot:
            yield _call(other, "dim", shown)


def _numbers(call: Mapping[str, Any], shown: _Shown) -> Iterator[str]:
    if call.get("candidates"):
        yield f"candidate {call['candidate'] + 1} of {call['candidates']}"
        yield f"score {call['score']:+.2f}" if call.get("score") is not None else "no score"
    if call.get("unscored"):
        yield "unscored"
    elif call.get("reward") is not None:
        yield f"reward {call['reward']:+.2f}"
    advantage = call.get("advantage")
    if shown.trained:
        yield f"advantage {advantage:+.2f}" if advantage is not None else "not trained"
    yield counted(sum(call.get("response_mask", ())), "token")
    yield f"{call.get('seconds', 0.0):.1f} s"
    if call.get("stop_reason") not in ("", None) and (shown.full or call["stop_reason"] != "stop"):
        yield escape(str(call["stop_reason"]))


def _tool(tool: Mapping[str, Any], max_chars: int | None) -> Iterator[RenderableType]:
    arguments = dict(tool.get("arguments") or {})
    code = arguments.pop("code", None)
    details = f" {json.dumps(arguments, ensure_ascii=False)}" if arguments else ""
    yield Text(f"\n{tool['name']}{details}: {tool['status']}, {tool.get('seconds', 0.0):.1f} s", style="bold")
    if code is not None:
        yield _indented(str(code), "  ", max_chars)
    yield _indented(tool.get("text", ""), "> ", max_chars)


def _indented(text: str, prefix: str, max_chars: int | None) -> Text:
    return Text("\n").join(Text(prefix) + _literal(line, max_chars) for line in text.rstrip("\n").split("\n"))


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _literal(text: str, max_chars: int | None) -> Text:
    """Return text without rich's markup, cut in the middle."""
    if max_chars is not None and len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return Text(text)
