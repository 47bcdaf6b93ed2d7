"""One recorded episode, readable: `verl-dag trace OUTPUT_DIR`.

Invariant: reads `episodes.jsonl` and nothing else. Whatever a record holds (texts, names of tools, uids) is printed
literally, interpreted neither by rich nor by a terminal, and is legal in XML.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable
from recipe.dag.report.journal import EPISODES, episode_files, run_name
from recipe.dag.report.journal import read_records as read_lines
from recipe.dag.report.pass_at_k import SOLVED

COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
"""Border of each agent's calls, in the order in which the agents appear."""
MAX_CHARS = 4000
"""Length to which each text is cut unless all of it is asked for."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a folder's or file's journal, in order, with the name of their `run`. Raises UserError."""
    files = (episode_files(path) or [path / EPISODES[0]]) if path.is_dir() else [path]
    for file in files:
        for record in read_lines(file, "pass the output folder of a run, or its episodes.jsonl", _is_episode):
            yield record | {"run": run_name(file)}


def _is_episode(record: Mapping[str, Any]) -> bool:
    """Check the fields that every episode has, of the types that are read here."""
    calls, outcome = record.get("calls"), record.get("outcome")
    return (
        {"uid", "index"} <= record.keys()
        and isinstance(record.get("sample"), dict)
        and isinstance(outcome, int | float | None)
        and isinstance(calls, list)
        and all(isinstance(call, dict) and {"node", "agent", "text"} <= call.keys() for call in calls)
    )


def choose(
    records: Iterator[dict[str, Any]],
    *,
    step: int | None = None,
    split: Literal["train", "validation"] | None = None,
    solved: bool | None = None,
    position: int = 0,
) -> dict[str, Any]:
    """Return the episode at `position` among those that match, of the last step by default. Raises UserError if there
    are fewer."""
    matches: list[dict[str, Any]] = []
    count = 0
    for record in records:
        count += 1
        if step is not None and record.get("step") != step:
            continue
        if split is not None and record.get("split", "train") != split:
            continue
        if solved is not None and ((record.get("outcome") or 0.0) >= SOLVED) != solved:
            continue
        if step is None and matches and matches[-1].get("step") != record.get("step"):
            matches.clear()  # a later step
        matches.append(record)
    if len(matches) <= position:
        raise UserError(f"{len(matches)} of {count} recorded episodes match; episode {position} is not among them")
    return matches[position]


def render(record: Mapping[str, Any], *, max_chars: int | None = MAX_CHARS) -> RenderableType:
    """Return one episode as panels: the problem, and for each call its text, tools, reward and advantage."""
    record = _printable(record)
    agents = list(dict.fromkeys(call["agent"] for call in record["calls"]))
    trained = record.get("split", "train") == "train"
    parts: list[RenderableType] = [Text(_headline(record), style="bold"), _problem(record, max_chars)]
    for call in record["calls"]:
        parts.append(_call(call, COLORS[agents.index(call["agent"]) % len(COLORS)], max_chars, trained))
        if call.get("candidates"):
            parts += _siblings(call, record.get("dropped", ()), max_chars, trained)
    for skip in record.get("skips", ()):
        parts.append(Text(f"turn {skip['turn']}: node {skip['node']} was skipped ({skip['reason']})", style="dim"))
    fault = record.get("fault")
    if fault:
        source = f"{fault.get('boundary', '')} fault in {fault.get('where', '')}"
        parts.append(Text(f"ended by a {source}: {fault.get('message', '')}", style="red"))
    return Group(*parts)


def show(record: Mapping[str, Any], console: Console, *, max_chars: int | None = MAX_CHARS) -> None:
    console.print(render(record, max_chars=max_chars))


def write_svg(record: Mapping[str, Any], path: Path, *, max_chars: int | None = MAX_CHARS) -> None:
    """Write the episode as a picture, 100 columns wide. It loads no font: rich's style sheet names a CDN."""
    console = Console(record=True, width=100, file=io.StringIO())
    show(record, console, max_chars=max_chars)
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
    return f"sample {record['uid']}, episode {record['index']}"


def _problem(record: Mapping[str, Any], max_chars: int | None) -> Panel:
    prompt = record["sample"].get("prompt", "")
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return Panel(_literal(str(prompt), max_chars), title="problem", title_align="left", box=box.SQUARE, style="dim")


def _call(call: Mapping[str, Any], color: str, max_chars: int | None, trained: bool) -> Panel:
    body: list[RenderableType] = []
    if call.get("observation"):
        body += [Text("observation", style="bold"), _indented(call["observation"], "< ", max_chars), Text()]
    body.append(_literal(call.get("completion") or call["text"], max_chars))
    for tool in call.get("tool_results", ()):
        body += _tool(tool, max_chars)
    name = call["node"] if call["node"] == call["agent"] else f"{call['node']} ({call['agent']})"
    where = "".join(f", {key} {call[key]}" for key in ("turn", "round") if call.get(key))
    return Panel(
        Group(*body),
        title=f"[bold]{escape(name)}[/bold]{where}",
        title_align="left",
        subtitle=", ".join(_numbers(call, trained)),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=color,
    )


def _siblings(
    call: Mapping[str, Any], dropped: Iterable[Mapping[str, Any]], max_chars: int | None, trained: bool
) -> Iterator[Panel]:
    """Yield the siblings of a candidate, which were not kept."""
    slot = [call[key] for key in ("node", "turn", "round")]
    for other in dropped:
        if [other[key] for key in ("node", "turn", "round")] == slot:
            yield _call(other, "dim", max_chars, trained)


def _numbers(call: Mapping[str, Any], trained: bool) -> Iterator[str]:
    if call.get("candidates"):
        yield f"candidate {call['candidate'] + 1} of {call['candidates']}"
        yield f"score {call['score']:+.2f}" if call.get("score") is not None else "no score"
    if call.get("unscored"):
        yield "unscored"
    elif call.get("reward") is not None:
        yield f"reward {call['reward']:+.2f}"
    advantage = call.get("advantage")
    if trained:
        yield f"advantage {advantage:+.2f}" if advantage is not None else "not trained"
    yield f"{sum(call.get('response_mask', ()))} tokens"
    yield f"{call.get('seconds', 0.0):.1f} s"
    if call.get("stop_reason") not in ("stop", "", None):
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
