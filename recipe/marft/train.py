"""`python -m recipe.marft.train [--show] [--config-name NAME] key=value ...`: MARFT, with siiRL's flags or our own.

Invariant: what a flag changes in the workflow is changed in a copy, `workflow.yaml` in the run's folder; the run then
is an ordinary one of `recipe.dag.main`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from recipe.dag import main as engine
from recipe.dag.errors import UserError
from recipe.dag.workflow.problem import WorkflowError
from recipe.marft.edits import edited
from recipe.marft.flags import translate
from recipe.marft.rules import Translation

CONFIG = Path(__file__).parent / "config"


def prepared(config_name: str, arguments: list[str]) -> tuple[list[str], Path, str | None]:
    """(hydra overrides, the workflow's copy, its text); None for the text where no flag changes the workflow."""
    out = translate(arguments)
    config = engine.compose_config(config_name, _listed(out), CONFIG)
    if (epochs := out.edits.pop("total_epochs", None)) is not None:
        rows = _rows(config.data.train_files)
        out.overrides["trainer.total_training_steps"] = str(max(1, int(epochs * rows // config.data.train_batch_size)))
    copy = Path(config.output_dir) / "workflow.yaml"
    if not out.edits:
        return _listed(out), copy, None
    source = Path(str(config.workflow))
    if not source.is_file():
        raise UserError(f"{source}: no such workflow")
    text = edited(source, out.edits, batch_size=int(config.data.train_batch_size))
    out.overrides["workflow"] = str(copy)
    return _listed(out), copy, text


def _listed(out: Translation) -> list[str]:
    return [f"{key}={value}" for key, value in out.overrides.items()]


def _rows(files: str | Sequence[str] | None) -> int:
    names = [files] if isinstance(files, str) else list(files or ())
    if not names or not all(name.endswith(".parquet") and Path(name).is_file() for name in names):
        raise UserError("trainer.total_epochs: only for parquet data.train_files; give trainer.total_training_steps")
    return sum(pq.read_metadata(name).num_rows for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.marft.train", description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", default="qwen2_5_3b", help=f"a file in {CONFIG.name}/, without .yaml")
    parser.add_argument("--show", action="store_true", help="print what the flags mean here, and start nothing")
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    try:
        overrides, copy, text = prepared(args.config_name, args.arguments)
        if args.show:
            print("\n".join(overrides))
            if text is not None:
                print(f"\n# {copy}\n{text}", end="")
            return 0
        if text is not None:
            copy.parent.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f".{copy.name}.{os.getpid()}")
            partial.write_text(text)
            os.replace(partial, copy)
    except WorkflowError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return engine.main(["--config-path", str(CONFIG), "--config-name", args.config_name, *overrides])


if __name__ == "__main__":
    sys.exit(main())
