"""`verl-dag new NAME`: copies a small task that trains as it is, to be changed file by file.

Invariant: a folder with content is never changed, and a new folder appears only when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from recipe.dag.core.errors import UserError, writing
from recipe.dag.core.paths import ROOT, shipped

TEMPLATE = Path(__file__).parent / "new_task"


def new_task(folder: Path) -> list[Path]:
    """Write the task into `folder`, which gives it its name, and return the files. Raises UserError."""
    name = folder.name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{folder}: a task's name consists of lower-case letters, digits and _, such as my_task")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; choose another name")
    path = folder.resolve()
    # an installed package has no folder for outputs
    home = ROOT if (ROOT / "pyproject.toml").is_file() else Path.cwd()
    values = {
        "name": name,
        "folder": os.path.relpath(path, home) if path.is_relative_to(home) else str(path),
        "root": os.path.relpath(home, path),
        "home": "the folder of verl-dag" if home is ROOT else str(home),
        "scripts": "recipe/dag/scripts" if home is ROOT else str(shipped("recipe/dag/scripts")),
        "schema": os.path.relpath(shipped("workflows/workflow.schema.json"), path),
    }
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            partial.chmod(0o755)
            sources = (path for path in sorted(TEMPLATE.rglob("*")) if path.is_file())
            files = [_write(source, partial, values) for source in sources if "__pycache__" not in source.parts]
            if folder.exists():
                folder.rmdir()
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return [folder / file for file in files]


def _write(source: Path, folder: Path, values: dict[str, str]) -> Path:
    """Copy one file into `folder` with each @key@ replaced, and return its path within the folder."""
    file = source.relative_to(TEMPLATE)
    target = folder / file
    target.parent.mkdir(exist_ok=True)
    text = re.sub(f"@({'|'.join(values)})@", lambda match: values[match[1]], source.read_text(encoding="utf-8"))
    target.write_text(text, encoding="utf-8")
    if file.suffix == ".sh":
        target.chmod(0o755)
    return file
