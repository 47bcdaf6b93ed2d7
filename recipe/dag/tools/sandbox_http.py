"""Connections to a sandbox server, over TCP or a UNIX socket.

Invariant: a request goes to the server itself, without proxies and without cookies.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import aiohttp

_UNIX = "http+unix://"
_URL = re.compile(r"((?:[^/]*//)?)(?:[^/@:]*(?::([^/@]*))?@)?(.*?)/*(?:/run_code/*)?", re.DOTALL)


class _Quiet(aiohttp.BaseConnector):
    """Counts as closed once its loop has ended, so that no warning is printed then."""

    @property
    def closed(self) -> bool:
        return super().closed or self._loop.is_closed()

    def __del__(self) -> None:
        if not self.closed:
            super().__del__()


class _Tcp(_Quiet, aiohttp.TCPConnector): ...


class _Unix(_Quiet, aiohttp.UnixConnector): ...


def split(url: str) -> tuple[str, str | None]:
    """Return the server's root and the token, from a URL of the form http://HOST, http://NAME:TOKEN@HOST or
    http+unix://PATH, the path of a UNIX socket with %2F for each slash. Each may end in /run_code."""
    match = _URL.fullmatch(url.strip())
    assert match is not None  # the pattern matches every text
    scheme, token, rest = match.groups()
    return scheme + rest, unquote(token) if token else None


def http_root(root: str) -> str:
    """Return what requests to the server at `root` begin with."""
    return "http://localhost" if root.startswith(_UNIX) else root


def open_http(root: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session whose requests to `http_root(root)` reach the server. It has neither proxies nor cookies, and
    does not limit the connections. Needs a running event loop; options: ClientSession's."""
    connector = _Unix(unquote(root.removeprefix(_UNIX)), limit=0) if root.startswith(_UNIX) else _Tcp(limit=0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **options)


def authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
