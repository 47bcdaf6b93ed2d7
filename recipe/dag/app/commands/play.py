"""`verl-dag validate --play`: episodes without a model, and what they show about the workflow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from recipe.dag.app.inspection import first_sample
from recipe.dag.core.errors import UserError
from recipe.dag.episode.rehearsal import SAMPLE, paid_alike, rehearse, unseen_keys
from recipe.dag.report.journal import record_of
from recipe.dag.report.jsonfile import to_json

if TYPE_CHECKING:
    from recipe.dag.workflow.schema import Workflow


def play_episodes(workflow: Workflow, data: str | None, *, show: bool) -> None:
    """Play the first row of `data`, warn of keys that nothing writes and of rewards that
    pay for anything, and print the episodes if `show`. Raises
    UserError."""
    try:
        episodes = rehearse(workflow, first_sample(data) if data else SAMPLE)
    except UserError as error:
        hint = "" if data else " (the problem and its ground truth are made up; pass --data FILE for yours)"
        raise UserError(f"{error}{hint}") from error
    for line in (*unseen_keys(workflow, episodes), *paid_alike(episodes)):
        typer.echo(f"{workflow.path}: warning: {line}", err=True)
    if show:
        from rich.console import Console

        from recipe.dag.report.trace import show as show_episode

        for episode in episodes:
            show_episode(json.loads(to_json(record_of(episode))), Console())
