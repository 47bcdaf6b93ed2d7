"""Text and configurations as they may be kept: without passwords, tokens and keys.

Invariant: never writes a value of an environment variable that is named like a secret, a value under a key that is, or
the credentials in a URL. An interpolation (`${...}`) is no secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SECRET = {"apikey", "authorization", "credential", "passwd", "password", "secret", "token"}
_PAIRS = {("access", "key"), ("api", "key"), ("auth", "key"), ("private", "key"), ("secret", "key"), ("wandb", "key")}
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
"""What makes a `..._token` one of a tokenizer, or a number of them."""
_TOKENS_OF = {"access", "api", "auth", "bearer", "hf", "refresh", "secret"}
"""What makes `..._tokens` several secrets; those of a text are counted and listed under many names."""
_SHORTEST = 8
"""Characters of an environment variable's value below which hiding it would hide ordinary words."""
_NAME = re.compile(r"""([\w.-]+)["']?[ \t]*[=:][ \t]*""")
_VALUE = re.compile(
    r"""(?:(?:Basic|Bearer|Digest|Token)[ ]+)?\$\{[^}\n]*\}|"[^"\n]*"|'[^'\n]*'"""
    r"""|\[[^\]]*\]|(?:\n[ ]*-[ ]+(?![\w.-]+:\s)[^\n]+)+|(?:(?:Basic|Bearer|Digest|Token)[ ]+)?[^\s,}\]'"{\[]+"""
)
"""Of one name: an interpolation, a text, a list on one line or one item a line, the credentials of a header, a word."""
_OPTION = re.compile(r"--?([\w-]+)")
_USERINFO = re.compile(r"(\w+://)[^/\s'\"]+@")
_KEYS = re.compile(r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|xox[abp]-[\w-]{10,}|AKIA\w{12,})")


def is_secret(name: str) -> bool:
    """Whether a key, option or variable of this name holds a secret."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if words[-1:] == ["tokens"]:
        return words == ["tokens"] or name.lower().endswith(".tokens") or words[-2] in _TOKENS_OF
    words[-1:] = [word.removesuffix("s") for word in words[-1:]]
    if words[-1:] == ["token"] and len(words) > 1 and words[-2] in _VOCABULARY:
        return False
    return bool(words) and (words[-1] in _SECRET or tuple(words[-2:]) in _PAIRS)


def without_secrets(value: Any) -> Any:
    """Return a copy of mappings, lists and texts in which every secret is `***`."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return text_without_secrets(value) if isinstance(value, str) else value


def text_without_secrets(text: str) -> str:
    """Return `text`, of any format, in which `name: value` and `name=value` of a secret, credentials in URLs, keys of
    known forms and values of secret environment variables are `***`."""
    for value in _environment():
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    return _KEYS.sub(HIDDEN, "".join(_pieces(text)))


def command_without_secrets(arguments: list[str]) -> list[str]:
    """Return a command line in which secrets are `***`, those behind an option (`--token VALUE`) included."""
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
    """`text` with what is assigned to a secret's name hidden."""
    end = 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if is_secret(name[1]) and name.start() >= end else None
        if value is not None and value[0].strip("\"'") not in ("", "[]", "null", "None", "true", "false"):
            if not _interpolated(value[0].strip("\"'")) and not _counts(name[1], value[0]):
                yield text[end : value.start()]
                yield HIDDEN if value[0][0] != "\n" else f" {HIDDEN}"
                end = value.end()
    yield text[end:]


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"(?:(?:Basic|Bearer|Digest|Token) +)?\$\{", value) is not None


def _counts(name: str, value: Any) -> bool:
    """Whether `value` is a number of tokens, or their ids."""
    return name.lower().endswith("tokens") and re.fullmatch(r"[-\d.,\s\[\]]+", str(value)) is not None


def _environment() -> list[str]:
    """Longest first, so that one that holds another is hidden whole."""
    ending = ("_KEY", "_PAT")
    values = {v for k, v in os.environ.items() if is_secret(k) or k.upper().endswith(ending)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)
