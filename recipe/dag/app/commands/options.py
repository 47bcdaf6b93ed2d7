"""Arguments that several commands have, with one name and one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value ...", help="Settings of the run, and workflow.<key>=VALUE.", show_default=False),
]
ConfigPath = Annotated[Path | None, typer.Option("--config-path", help="Folder of the configuration.")]
ConfigName = Annotated[str, typer.Option("--config-name", help="A file in that folder, or of a recipe, without .yaml.")]
