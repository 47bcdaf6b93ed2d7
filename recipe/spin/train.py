"""`python -m recipe.spin.train [--show] key=value ...`: train, with the keys of verl's recipe `spin` or ours.

Invariant: a key of that recipe becomes an edit of the workflow or is refused with a reason; all other arguments are
passed on as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.dag.app import main as engine
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import mistakes_reported
from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.workflow.verl_keys import RUN

CONFIG = Path(__file__).parent / "config"
BETA = (f"{RUN}.actor.dpo_beta", "algorithm.dpo_beta")
EDITS = {
    **dict.fromkeys(BETA, "workflow.algorithm.beta"),
    "algorithm.dpo_loss_type": "workflow.algorithm.loss",
    "algorithm.dpo_label_smoothing": "workflow.algorithm.label_smoothing",
}
"""Key of verl's recipe -> the edit of the workflow."""
REFRESH, ESTIMATOR, MODEL = "trainer.ref_update_freq", "algorithm.adv_estimator", f"{RUN}.model.path"


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in this project's keys. Raises UserError."""
    passed, theirs = [], {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        name = key.lstrip("+")
        if name in EDITS or name in (REFRESH, ESTIMATOR, MODEL):
            theirs[name] = value
        else:
            passed.append(argument)
    betas = {theirs[key] for key in BETA if key in theirs}
    if len(betas) > 1:
        raise UserError(f"{BETA[0]} and {BETA[1]} differ, and verl's recipe reads the first alone; pass one of them")
    if theirs.get(ESTIMATOR, "null") not in ("null", "spin"):
        raise UserError(f"{ESTIMATOR}={theirs[ESTIMATOR]}: pairs need no advantages; pass null, or leave this out")
    smoothing = theirs.get("algorithm.dpo_label_smoothing")
    if theirs.get("algorithm.dpo_loss_type", "sigmoid") != "sigmoid" and smoothing in ("0", "0.0"):
        del theirs["algorithm.dpo_label_smoothing"]  # the default, which only sigmoid reads
    passed += [f"model_path={theirs[MODEL]}"] if MODEL in theirs else []
    passed += dict.fromkeys(f"{EDITS[key]}={value}" for key, value in theirs.items() if key in EDITS)
    return passed + (_refresh(passed, theirs[REFRESH]) if REFRESH in theirs else [])


def _refresh(arguments: Sequence[str], steps: str) -> list[str]:
    """Return the edits of the references of all trained policies, which are never renewed for 0 and below."""
    try:
        number = int(steps)
    except ValueError as error:
        raise UserError(f"{REFRESH}={steps}: expected a whole number of steps") from error
    files = [argument.partition("=")[2] for argument in arguments if argument.startswith("workflow=")]
    if not files:
        raise UserError(f"{REFRESH}={steps}: the policies of which workflow? Add workflow=FILE")
    workflow = load_edited(files[-1], split_edits(arguments)[1])
    value = f"{{refresh: {number}}}" if number > 0 else "true"
    return [f"workflow.policies.{name}.reference={value}" for name in workflow.trained_policies()]


@mistakes_reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.spin.train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config-name", default="spin_trainer", help=f"a file in {CONFIG.name}/, without .yaml")
    parser.add_argument("--show", action="store_true", help="print the translated keys and exit")
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    overrides = translate(args.arguments)
    if args.show:
        print("\n".join(overrides))
        return 0
    return engine.main(["--config-path", str(CONFIG), "--config-name", args.config_name, *overrides])


if __name__ == "__main__":
    sys.exit(main())
