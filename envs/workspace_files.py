"""The files that a sample brings into its episode's workspace.

Invariant: only files below the data root are read, whatever a data set names; nothing is written here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipe.dag.errors import UserError

FORMS = "a path, {path: ...}, {text: ...} or {base64: ...}"


def files_of(sample: Mapping[str, Any], data_root: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file in `extra_info.files`, a mapping or its JSON text.

    data_root: the folder that paths are relative to and below which files must be; None: the folder of the data set.
    Raises UserError for a file that is missing, outside of the root or malformed.
    """
    declared = (sample.get("extra_info") or {}).get("files") or {}
    if isinstance(declared, str):
        try:
            declared = json.loads(declared)
        except ValueError as error:
            raise UserError(f"Workspace: extra_info.files is not JSON: {error}") from None
    if not isinstance(declared, Mapping):
        raise UserError(f"Workspace: extra_info.files must map names to {FORMS}, not be a {type(declared).__name__}")
    root = Path(data_root or sample.get("data_folder") or ".").expanduser()
    for name, source in declared.items():
        if source is not None:  # parquet gives every row the keys of all rows
            yield name, _content(name, source, root)


def _content(name: str, source: Any, root: Path) -> bytes:
    if isinstance(source, str):
        source = {"path": source}
    given = {kind: value for kind, value in source.items() if value is not None} if isinstance(source, Mapping) else {}
    kind, value = next(iter(given.items()), ("", None))
    if len(given) != 1 or kind not in ("path", "text", "base64") or not isinstance(value, str):
        raise UserError(f"Workspace: extra_info.files[{name!r}] must be {FORMS}, not {str(source)[:80]!r}")
    if kind == "text":
        return value.encode()
    if kind == "base64":
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"Workspace: extra_info.files[{name!r}] is not base64: {error}") from None
    return _read(name, value, root)


def _read(name: str, path: str, root: Path) -> bytes:
    file, folder = (root / path).resolve(), root.resolve()
    if not file.is_relative_to(folder):
        raise UserError(f"Workspace: file {path!r} of {name!r} is outside of the data root {folder}; set `data_root`")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"Workspace: file {file} of {name!r} cannot be read ({error.strerror}); paths in extra_info.files are "
            "relative to the folder of the data set, or to `data_root` of the env"
        ) from None
