"""What several commands have: arguments, with one name and one help text each, and the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value ...", help="Settings of the run, and workflow.<key>=VALUE.", show_default=False),
]
ConfigPath = Annotated[Path | None, typer.Option("--config-path", help="Folder of the configuration.")]
ConfigName = Annotated[str, typer.Option("--config-name", help="A file in that folder, or of a recipe, without .yaml.")]


def open_console() -> Console:
    """Return the console of stdout, which cuts nothing in a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 1000
    return console
