"""`python -m recipe.marft.train [--show] [--config-name NAME] key=value ...`: train MARFT, with siiRL's flags or ours.

Invariant: flags change a copy of the workflow, `workflow.yaml` in the run's folder, which is checked before it is
written; the run itself is an ordinary one of `recipe.dag.app.main`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.dag.app import main as engine
from recipe.dag.app.preflight import check_overrides
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import Problem, WorkflowError, mistakes_reported
from recipe.dag.loading.edits import PREFIX, Edit, load_edited, paths_of, split_edits
from recipe.dag.loading.workflow_copy import WorkflowCopy
from recipe.dag.report.run_record import launches
from recipe.dag.settings.compose import compose_config, typed_settings
from recipe.dag.settings.effects import check_effects
from recipe.dag.settings.kinds import COUNT
from recipe.marft.checks import check_flags, check_policies, checked_value, steps_of
from recipe.marft.edits import edited
from recipe.marft.flags import translate
from recipe.marft.rules import Errors, Translation

CONFIG = Path(__file__).parent / "config"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that has been checked and not started."""

    overrides: list[str]
    """Arguments of `recipe.dag.app.main`."""
    copy: Path
    """Path of the edited workflow."""
    text: str | None
    """Text of the edited workflow; None if no flag changes it."""
    warnings: tuple[Problem, ...]
    """Warnings about the original workflow, except about options that a flag sets."""
    unreported: tuple[Problem, ...]
    """Those of `warnings` that do not apply to the copy, so that the run will not print them."""


def prepared(config_name: str, arguments: list[str]) -> Prepared:
    """Translate and check the arguments; nothing is started or written. Raises UserError, with a line for each mistake
    of the command line, or WorkflowError."""
    errors, run = Errors(), None
    out = translate(arguments, errors)
    try:
        with errors.collected():
            config = compose_config(config_name, split_edits(_listed(out))[0], CONFIG)
            run = _prepared(out, config, errors)
    except WorkflowError as error:
        if not errors.lines:
            raise
        errors.lines += str(error).splitlines()
    except OmegaConfBaseException as error:
        errors.lines.append(f"configuration: {str(error).splitlines()[0]}")
    errors.check()
    assert run is not None  # else there are errors
    return run


def _prepared(out: Translation, config: DictConfig, errors: Errors) -> Prepared:
    # an invalid interpolation raises here, not in the run
    for key in (key for key in out.overrides if not key.lstrip("+~").startswith(PREFIX)):
        OmegaConf.select(config, key.lstrip("+~"))
    with errors.collected():
        check_flags(out, config)
    with errors.collected():
        if out.edits.pop("total_epochs", None) is not None:
            out.overrides["trainer.total_training_steps"] = str(steps_of(out, config))
    settings, typed_edits = split_edits(_listed(out))
    copy, flow = Path(str(config.output_dir)) / "workflow.yaml", load_edited(str(config.workflow), typed_edits)
    with errors.collected():
        check_overrides(flow.path, config, flow.edited)
    typed = typed_settings(settings)
    if not out.edits:
        with errors.collected():
            check_effects(typed, config, flow)
        check_policies(config, flow)
        return Prepared(_listed(out), copy, None, flow.warnings, ())
    if copy.exists() and copy.samefile(flow.path):
        raise UserError(
            f"output_dir={config.output_dir}: the run would replace its workflow {copy}; pass another output_dir"
        )
    batch_size = checked_value(config, "data.train_batch_size", COUNT)
    try:
        text, loaded, decided = edited(flow, out.edits, batch_size=batch_size, at=copy, errors=errors)
    except UserError:
        if "adv_estimator" not in out.edits:  # which may add and remove critics
            with errors.collected():
                check_effects(typed, config, flow)
        raise
    with errors.collected():
        _check_given_once(typed_edits, WorkflowCopy(text))
    with errors.collected():
        check_effects(typed, config, loaded)
    check_policies(config, loaded)
    for edit in typed_edits:  # the copy contains them
        del out.overrides[edit.argument.partition("=")[0]]
    out.overrides["workflow"] = str(copy)
    warnings = tuple(warning for warning in flow.warnings if not any(name in warning.message for name in decided))
    of_copy = {warning.message for warning in loaded.warnings}
    unreported = tuple(warning for warning in warnings if warning.message not in of_copy)
    return Prepared(_listed(out), copy, text, warnings, unreported)


def _check_given_once(typed: Sequence[Edit], copy: WorkflowCopy) -> None:
    """Raise UserError if the copy, which has the flags' edits, no longer has what `workflow.<key>=VALUE` set."""
    for edit in typed:
        for path in paths_of(edit, copy):
            if copy.has(path) if edit.removes else copy.get(*path) != edit.value:
                raise UserError(f"{edit.argument}: a flag of siiRL's sets the same key; pass only one of the two")


def _listed(out: Translation) -> list[str]:
    return [key if value is None else f"{key}={value}" for key, value in out.overrides.items()]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}; pass another output_dir") from error


def _restore(path: Path, before: str | None, folder_is_new: bool) -> None:
    """Restore the state before a run that was refused: the earlier run's copy, or no file."""
    if before is not None:
        _write(path, before)
        return
    path.unlink(missing_ok=True)
    if folder_is_new:
        with contextlib.suppress(OSError):  # another file was written into it
            path.parent.rmdir()


@mistakes_reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.marft.train", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--config-name", default="qwen2_5_3b", help=f"a file in {CONFIG.name}/, without .yaml")
    parser.add_argument("--show", action="store_true", help="print the translated flags and exit")
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    run = prepared(args.config_name, args.arguments)
    for warning in run.warnings if args.show else run.unreported:
        print(warning.as_warning(), file=sys.stderr)
    if args.show:
        print("\n".join(run.overrides))
        if run.text is not None:
            print(f"\n# {run.copy}\n{run.text}", end="")
        return 0
    before = run.copy.read_text() if run.copy.is_file() else None
    folder_is_new = not run.copy.parent.exists()
    earlier = launches(run.copy.parent)
    if run.text is not None:
        _write(run.copy, run.text)
    code = engine.main(["--config-path", str(CONFIG), "--config-name", args.config_name, *run.overrides])
    if code == 2 and run.text is not None and launches(run.copy.parent) == earlier:
        _restore(run.copy, before, folder_is_new)
    return code


if __name__ == "__main__":
    sys.exit(main())
