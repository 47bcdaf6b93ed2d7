"""The arguments that a user types after a command: keys with values, and profiles.

Invariant: `+key=value` and `++key=value` mean `key=value`; whether a key exists does not depend on the sign. hydra
parses the values. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from recipe.dag.core.errors import UserError, raise_all


@dataclass(frozen=True, slots=True)
class Typed:
    """One `key=value`."""

    key: str
    """Dotted, without a sign."""
    value: Any
    argument: str
    """The text as it was typed."""


@dataclass(frozen=True, slots=True)
class Arguments:
    settings: tuple[Typed, ...]
    profiles: tuple[str, ...]
    """Entries for hydra's defaults list: `+profile=gpu_32gb`."""


def parse(arguments: Iterable[str], folders: Iterable[Path]) -> Arguments:
    """Parse the arguments. `folders` hold configurations; their subfolders are hydra's groups. Raises UserError with a
    line for each argument that cannot be parsed."""
    settings, profiles, wrong = [], [], []
    folders = list(folders)
    for argument in arguments:
        try:
            override = _parsed(argument)
            if any((folder / override.key_or_group).is_dir() for folder in folders):
                profiles.append(f"+{override.key_or_group}={override.value()}")
            else:
                settings.append(_setting(argument, override))
        except UserError as error:
            wrong.append(str(error))
    raise_all(wrong)
    return Arguments(tuple(settings), tuple(profiles))


def _parsed(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError, RecursionError) as error:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"{argument}: write it as key=value") from error
        quoted = "'" + value.replace("'", "\\'") + "'"
        raise UserError(f'{argument}: hydra cannot parse the value; quote it: {key}="{quoted}"') from error


def _setting(argument: str, override: Override) -> Typed:
    key = override.key_or_group
    if override.is_delete():
        raise UserError(f"{argument}: a key cannot be deleted; leave it out, or pass {key}=VALUE")
    if override.package is not None:
        raise UserError(f"{argument}: `@` chooses one of verl's configuration files, which are fixed here; remove it")
    if override.is_sweep_override():
        raise UserError(f"{argument}: one run takes one value; write a list as {key}=[A,B]")
    return Typed(key, override.value(), argument)
