"""Removal of passwords, tokens and keys from text and configurations.

Invariant: the output never contains the value of an environment variable or key that is named like a secret, of a
variable that the workflow names as `key_env`, or credentials in a URL. An interpolation (`${...}`) is not a secret.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.dag.tools.address import KEYS

HIDDEN = "***"
_SECRET = {"authorization", "cookie", "credential", "jwt", "secret", "token"}
_ENDINGS = ("apikey", "passcode", "passphrase", "passwd", "password")
"""Of a word, since they are glued to others: PGPASSWORD."""
_PAIRS = re.compile(
    r"(access|account|api|auth|encryption|license|master|private|secret|session|shared) key"
    r"|(signing|ssh|subscription|wandb) key"
    r"|(db|mysql|smtp|user) (pass|pwd)"
)
"""The last two words."""
_VOCABULARY = {
    "bos",
    "end",
    "eos",
    "image",
    "last",
    "max",
    "min",
    "pad",
    "per",
    "sep",
    "special",
    "start",
    "stop",
    "unk",
}
"""Words before `_token` that mean a special token of a tokenizer, or a number of tokens."""
_TOKENS_OF = {"access", "api", "auth", "bearer", "hf", "refresh", "secret"}
"""Words before `_tokens` that mean secrets; most keys in `_tokens` are counts or lists of a text's tokens."""
_SHORTEST = 8
"""Minimum length of an environment variable's value to be hidden: shorter ones occur as ordinary words."""
_NAME = re.compile(r"""([\w.-]+)["']?[ \t]*[=:][ \t]*""")
_VALUE = re.compile(
    r"""(?:(?:Basic|Bearer|Digest|Token)[ ]+)?\$\{[^}\n]*\}|"(?:\\.|[^"\\])*"|'(?:''|[^'])*'"""
    r"""|[|>][-+\d]*[ \t]*(?:\#[^\n]*)?\n(?:[ \t]*\n)*([ ]+)[^\n]*(?:\n(?:\1[^\n]*|[ \t]*(?=\n)))*"""
    r"""|\[[^\]]*\]|(?:\n[ ]*-[ ]+(?![\w.-]+:\s)[^\n]+)+|(?:(?:Basic|Bearer|Digest|Token)[ ]+)?[^\s,}\]'"{\[]+"""
)
"""A value: an interpolation, a string, a block scalar, a list (on one line or one item per line), a header's
credentials, a word."""
_OPTION = re.compile(r"--?([\w-]+)")
_USERINFO = re.compile(r"(\w+://)[^/\s'\"]+@")
_KEYS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}"
    r"|AKIA\w{12,}|AIza[\w-]{30,}|ya29\.[\w-]{20,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_secret(name: str) -> bool:
    """Return True if a key, option or variable of this name holds a secret."""
    words = [word for word in re.split(r"[^a-z0-9]+", _CAPITAL.sub("_", name).lower()) if word]
    if words[-1:] == ["tokens"]:
        return words == ["tokens"] or name.lower().endswith(".tokens") or words[-2] in _TOKENS_OF
    words[-1:] = [word.removesuffix("s") for word in words[-1:]]
    if words[-1:] == ["token"] and len(words) > 1 and words[-2] in _VOCABULARY:
        return False
    if not words:
        return False
    return words[-1] in _SECRET or words[-1].endswith(_ENDINGS) or _PAIRS.fullmatch(" ".join(words[-2:])) is not None


def without_secrets(value: Any) -> Any:
    """Return a copy of nested mappings, lists and strings in which every secret is `***`."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return text_without_secrets(value) if isinstance(value, str) else value


def text_without_secrets(text: str) -> str:
    """Return `text`, in any format, with secrets replaced by `***`.

    Secrets are values in `name: value` and `name=value`, credentials in URLs, keys of known forms, and values of secret
    environment variables.
    """
    for value in _environment():
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    return _KEYS.sub(HIDDEN, "".join(_pieces(text)))


def command_without_secrets(arguments: list[str]) -> list[str]:
    """Return a command line in which secrets are `***`, including the value of an option (`--token VALUE`)."""
    options = [None, *(_OPTION.fullmatch(argument) for argument in arguments)]
    return [
        HIDDEN if option is not None and is_secret(option[1]) else text_without_secrets(argument)
        for option, argument in zip(options, arguments, strict=False)
    ]


def _under(key: str, value: Any) -> Any:
    if is_secret(key) and isinstance(value, (list, tuple)):
        return [_under(key, item) for item in value]
    hide = is_secret(key) and isinstance(value, str | int | float) and value != "" and not _interpolated(value)
    hide = hide and not _counts(key, value)
    return HIDDEN if hide and not isinstance(value, bool) else without_secrets(value)


def _pieces(text: str) -> Iterator[str]:
    """Yield `text` in pieces, with the values of secret names hidden."""
    end = 0
    for name in _NAME.finditer(text):
        # a name before `end` is part of a value that is already hidden
        value = _VALUE.match(text, name.end()) if is_secret(name[1]) and name.start() >= end else None
        if value is not None and _is_worth_hiding(name[1], value[0]):
            yield text[end : value.start()]
            yield HIDDEN if value[0][0] != "\n" else f" {HIDDEN}"
            end = value.end()
    yield text[end:]


def _is_worth_hiding(name: str, value: str) -> bool:
    plain = value.strip("\"'")
    if plain in ("", "[]", "null", "None", "true", "false"):
        return False
    return not _interpolated(plain) and not _counts(name, value)


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"(?:(?:Basic|Bearer|Digest|Token) +)?\$\{", value) is not None


def _counts(name: str, value: Any) -> bool:
    """Return True if `value` is a number of tokens, or a list of token ids."""
    return name.lower().endswith("tokens") and re.fullmatch(r"[-\d.,\s\[\]]+", str(value)) is not None


def _environment() -> list[str]:
    """Return keys and the values of secret variables, longest first, so that one that contains another is hidden
    completely."""
    values = KEYS | {value for name, value in os.environ.items() if _is_secret_variable(name)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


@functools.cache  # asked for each variable and each text; texts bring no names here, so the cache stays small
def _is_secret_variable(name: str) -> bool:
    return is_secret(name) or name.upper().endswith(("_KEY", "_PAT"))
