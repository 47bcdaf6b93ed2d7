"""`verl-dag audit`: what a workflow's reward pays for texts that need no skill, before a model learns to write them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from recipe.dag.app.commands.options import open_console
from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from recipe.dag.episode.attacks import Attack
    from recipe.dag.episode.audit import Audit, Paid
    from recipe.dag.train.data import Sample
    from recipe.dag.workflow.schema import Workflow

MARGIN_S = 40
"""`sandbox.margin_s` of a run."""
_SHOWN = 60
"""Characters of an example."""


def audit(
    file: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow file.", show_default=False)],
    data: Annotated[str, typer.Option(help="The data file whose samples are played.")],
    bound: Annotated[
        float, typer.Option(min=0, help="The most that an attack may earn, as a share of what the label earns.")
    ] = 0.7,
    samples: Annotated[int, typer.Option(min=1, help="How many samples, evenly over the file.")] = 64,
    attacks: Annotated[str | None, typer.Option(help="A file.py whose ATTACKS are played, too.")] = None,
    sandbox_url: Annotated[
        str | None, typer.Option(help="A SandboxFusion server, instead of a local one; its token is in $SANDBOX_TOKEN.")
    ] = None,
) -> None:
    """Play texts that need no skill through a workflow, without a model, and print what its rewards pay for them. The
    exit code is 1 if an attack earns an agent more than the bound."""
    from recipe.dag.app.preflight import check_workflow
    from recipe.dag.episode.attacks import ATTACKS
    from recipe.dag.train.data import load_samples

    workflow = check_workflow(file)
    rows = load_samples(data, what="--data")
    chosen = [rows[number * len(rows) // samples] for number in range(samples)] if len(rows) > samples else rows
    more = _own_attacks(attacks) if attacks is not None else {}
    result = asyncio.run(_with_sandbox(workflow, chosen, {**ATTACKS, **more}, sandbox_url))
    open_console().print(_table(result))
    if found := result.above(bound):
        typer.echo(f"{file}: {_finding(result, found)}", err=True)
        raise typer.Exit(1)


def _own_attacks(path: str) -> Mapping[str, Attack]:
    from recipe.dag.core.user_code import load_object

    found = load_object(f"{path}:ATTACKS", ".")
    if not isinstance(found, Mapping) or not all(isinstance(a, str) or callable(a) for a in found.values()):
        raise UserError(f"--attacks {path}: ATTACKS must be a dict with a text, or a function of the sample, by name")
    return found


async def _with_sandbox(
    workflow: Workflow, samples: list[Sample], attacks: Mapping[str, Attack], url: str | None
) -> Audit:
    from recipe.dag.episode.audit import audit as play_attacks
    from recipe.dag.episode.make_tools import uses_sandbox
    from recipe.dag.tools.sandbox import Sandbox

    if not uses_sandbox(workflow):
        if url is not None:
            raise UserError("--sandbox-url has no effect: no agent and no env of the workflow runs programs; remove it")
        return await play_attacks(workflow, samples, attacks)
    if url is None:
        sandbox = await Sandbox.start()
    else:
        token = os.environ.get("SANDBOX_TOKEN")
        sandbox = await Sandbox.connect(url, token=token, max_concurrent=None, margin_s=MARGIN_S)
    try:
        return await play_attacks(workflow, samples, attacks, sandbox=sandbox.client)
    finally:
        await sandbox.close()


def _table(result: Audit) -> Table:
    """Return what each attack earns: mean, and in brackets the share of samples that are paid."""
    from rich.table import Table
    from rich.text import Text

    silent = printable(", ".join(result.silent))
    caption = f"not asked, since no model is: {silent}; a coach's verdict is taken to be 0" if silent else None
    table = Table(box=None, pad_edge=False, header_style="dim", caption=caption, caption_justify="left")
    table.add_column(counted(result.samples, "sample"), no_wrap=True)
    for agent, node in result.parts:
        table.add_column(Text(printable(f"{agent} by {node}")), justify="right", no_wrap=True)
    table.add_column("share of the label's", justify="right")
    for row in result.rows:
        cells = [row.parts.get(part) for part in result.parts]
        paid = [f"{cell[0]:+.2f} ({cell[1]:.0%})" if cell is not None else "not scored" for cell in cells]
        share, agent = result.share(row)
        earned = "" if row is result.rows[0] else f"{share:.2f} {agent}" if share > 0 else "0.00"
        table.add_row(Text(printable(row.attack)), *paid, Text(printable(earned)))
    return table


def _finding(result: Audit, found: list[tuple[Paid, float, str]]) -> str:
    row, share, agent = found[0]
    example = printable(" ".join(row.text.split()))
    example = example if len(example) <= _SHOWN else f"{example[:_SHOWN]}..."
    others = ", ".join(printable(other.attack) for other, *_ in found[1:])
    return (
        f"`{printable(row.attack)}` pays {agent} {row.agents[agent]:.2f}, {share:.0%} of what the label earns it "
        f"({result.worth(agent):.2f}); an example: {example!r}{f'; also above the bound: {others}' if others else ''}"
    )
