"""The record of each launch of a run: `run/1/`, `run/2/`, ... in its output folder.

Invariant: a launch's folder is complete or absent, and later launches never change it. It contains no secrets.

    run/1/launch.json       command line, seed, versions, commit, start time, checkpoint that it resumed or evaluated
    run/1/config.yaml       the composed and resolved configuration
    run/1/workflow.yaml     the workflow file, with the command line's changes
    run/1/workflow.json     the workflow as parsed: with defaults, presets and training chain
    run/1/fingerprint.json  digests of code, models and problems, and everything else that a resume compares
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from recipe.dag.core.errors import writing
from recipe.dag.core.versions import package_version
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.secrets import command_without_secrets, text_without_secrets, without_secrets
from recipe.dag.workflow.schema import Workflow

FOLDER = "run"
SUBSET = "subset.json"
PACKAGES = (
    "verl-dag",
    "verl",
    "torch",
    "transformers",
    "ray",
    "sglang",
    "tensordict",
    "flash-attn",
    "numpy",
    "pydantic",
)
_PROJECT = Path(__file__).resolve().parents[3]


def write_run_record(
    output: str | Path,
    *,
    config: Mapping[str, Any],
    workflow: Workflow,
    fingerprint: Mapping[str, Any],
    launch: Mapping[str, Any],
    subset: Mapping[str, Any] | None = None,
) -> Path:
    """Write the next `run/N` in `output` and return its path.

    `config` is resolved; `launch` has facts of this launch only, such as the checkpoint that it resumes from; `subset`
    becomes `subset.json` beside the records. Raises UserError if the folder cannot be written.
    """
    folder = Path(output) / FOLDER
    source = Path(workflow.path)
    with writing(folder, "; pass another output_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder, prefix=".partial_"))
        try:
            partial.chmod(0o755)
            _write_json(partial / "launch.json", {**surroundings(), **launch})
            with (partial / "config.yaml").open("w", encoding="utf-8") as file:
                yaml = YAML(typ="safe")
                yaml.default_flow_style = False
                yaml.dump(without_secrets(config), file)
            text = text_without_secrets(workflow.edited or source.read_text(encoding="utf-8-sig"))
            (partial / f"workflow{source.suffix}").write_text(text, encoding="utf-8")
            name = "workflow.json" if source.suffix != ".json" else "workflow_resolved.json"
            _write_json(partial / name, workflow.model_dump(mode="json"))
            _write_json(partial / "fingerprint.json", fingerprint)
            _write_subset(folder.with_name(SUBSET), subset)
            return _number(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _write_subset(path: Path, subset: Mapping[str, Any] | None) -> None:
    if subset is None:
        path.unlink(missing_ok=True)  # of an earlier experiment in the same folder
    else:
        replace_file(path, [to_json(dict(subset)), b"\n"])


def launches(output: str | Path) -> list[Path]:
    """Return the folders of all launches so far, in order."""
    folders = (path for path in (Path(output) / FOLDER).glob("*") if path.name.isdecimal())
    return sorted(folders, key=lambda path: int(path.name))


def _number(partial: Path, folder: Path) -> Path:
    """Rename `partial` to the next free number; another launch may take the same number at the same time."""
    number = max((int(path.name) for path in launches(folder.parent)), default=0)
    while True:
        number += 1
        try:
            os.rename(partial, folder / str(number))
        except OSError:
            if not (folder / str(number)).exists():
                raise
        else:
            return folder / str(number)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_bytes(to_json(without_secrets(data), indent=1) + b"\n")


def surroundings() -> dict[str, Any]:
    return {
        "command": command_without_secrets(list(getattr(sys, "orig_argv", sys.argv))),
        "folder": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}},
        "machine": platform.platform(),
        "checkout": _checkout(),
    }


def _checkout() -> dict[str, Any] | None:
    """Return the commit of this project's checkout and whether tracked files differ from it; None if not a checkout."""
    if _git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return None
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(_PROJECT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
