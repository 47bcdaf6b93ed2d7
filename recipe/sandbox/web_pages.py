"""Recognises requests that web pages send, which reach a server on a loopback address through the user's browser."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import web


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_from_page(request: web.BaseRequest) -> bool:
    """Return True if a web page sent the request, other than the user by opening its URL."""
    headers = request.headers
    return "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")


def is_for_loopback(request: web.BaseRequest) -> bool:
    """Return True if the request names a loopback address as its host. DNS rebinding leads a browser here under
    another name."""
    try:
        return is_loopback(urlsplit(f"//{request.headers.get('Host', 'localhost')}").hostname or "")
    except ValueError:
        return False
