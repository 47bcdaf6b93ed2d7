"""`python -m recipe.dag.main [--config-path FOLDER] [--config-name NAME] [--eval] key=value ...`: train or evaluate a
workflow.

Invariant: a mistake of the user is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from recipe.dag.app.launch import Evaluation, launch
from recipe.dag.app.preflight import check_run
from recipe.dag.core.problem import mistakes_reported
from recipe.dag.settings.compose import CONFIG_FOLDER


@mistakes_reported
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipe.dag.main", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config-path", type=Path, default=CONFIG_FOLDER, help="folder of the configuration")
    parser.add_argument("--config-name", default="dag", help="a file in that folder, without .yaml")
    parser.add_argument(
        "--eval", action="store_true", help="evaluate only: every policy frozen, results.json and summary.json"
    )
    parser.add_argument("--check", action="store_true", help="check configuration and workflow, and start nothing")
    keys = "settings of the run, and workflow.<key>=VALUE"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=keys)
    args = parser.parse_args(argv)
    if args.check:
        check_run(args.config_name, args.overrides, args.config_path, evaluate_only=args.eval)
    else:
        launch(args.config_name, args.overrides, args.config_path, Evaluation() if args.eval else None)
    return 0
