"""Workflows and what siiRL's flags make of them."""

from __future__ import annotations

from pathlib import Path

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.schema import Workflow
from recipe.marft.edits import edited
from recipe.marft.flags import translate

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / "workflows"
SIIRL = ROOT / "tests" / "compat" / "siirl"
MARFT = (WORKFLOWS / "workflow_marft.yaml").read_text()
NO_KL = MARFT.replace("  kl_loss_coef: 0.01\n", "").replace("    reference: true\n", "")


def change(source: Path, arguments: str, at: Path = Path("workflow.yaml")) -> tuple[str, Workflow]:
    """Return the text of the changed copy, which is to be at `at`, and the workflow that it holds."""
    return edited(load_workflow(source), translate(arguments.split()).edits, batch_size=128, at=at)[:2]


def written(tmp_path: Path, text: str) -> Path:
    """Write a workflow whose paths lead into this repository."""
    for folder in ("recipe", "envs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "own.yaml").write_text(text)
    return tmp_path / "own.yaml"
