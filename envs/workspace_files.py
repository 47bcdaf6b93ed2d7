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

from recipe.dag.core.errors import UserError

_KINDS = ("path", "content", "base64")
FORMS = "{name: path}, {name: {KIND: ...}} or [{name: ..., KIND: ...}], where KIND is path, content or base64"


def files_of(sample: Mapping[str, Any], data_root: str | None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file in `extra_info.files`, which has one of FORMS or is its JSON text.

    data_root: the folder that paths are relative to and below which files must be; None: the folder of the data set.
    Raises UserError for a file that is missing, outside of the root or malformed.
    """
    root = Path(data_root or sample.get("data_folder") or ".").expanduser()
    for name, source in _entries((sample.get("extra_info") or {}).get("files")):
        yield name, _content(name, source, root)


def _entries(declared: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(declared, str):
        try:
            declared = json.loads(declared)
        except ValueError as error:
            raise UserError(f"Workspace: extra_info.files is not JSON: {error}") from None
    if isinstance(declared, Mapping):
        declared = [
            {"name": name} | (dict(source) if isinstance(source, Mapping) else {"path": source})
            for name, source in declared.items()
            if source is not None  # parquet gives every row the keys of all rows
        ]
    for entry in declared if declared is not None else ():
        given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else {}
        name = given.pop("name", None)
        if (
            len(given) != 1
            or not given.keys() <= set(_KINDS)
            or not all(isinstance(v, str) for v in (name, *given.values()))
        ):
            raise UserError(f"Workspace: extra_info.files has the entry {str(entry)[:80]!r}; it must be {FORMS}")
        yield str(name), given


def _content(name: str, source: dict[str, Any], root: Path) -> bytes:
    if "content" in source:
        return source["content"].encode("utf-8", "replace")
    if "path" in source:
        return _read(name, source["path"], root)
    try:
        return base64.b64decode(source["base64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"Workspace: extra_info.files: {name[:100]!r} is not base64: {error}") from None


def _read(name: str, path: str, root: Path) -> bytes:
    file, folder = (root / path).resolve(), root.resolve()
    if not file.is_relative_to(folder):
        raise UserError(
            f"Workspace: {path!r}, the file of {name[:100]!r}, is outside of the folder {folder}; set `data_root` of "
            "the env to the folder of all files"
        )
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"Workspace: {file}, the file of {name[:100]!r}, cannot be read: {error.strerror}; paths in "
            "extra_info.files are relative to the folder of the data set, or to `data_root` of the env"
        ) from None
