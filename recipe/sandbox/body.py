"""Reads a request's body.

Invariant: every body, however malformed or slow, ends as decoded JSON or as `wire.Invalid` with the status to answer:
413 too large, 415 compressed, 408 too slow, 400 or 422 not JSON. The application's `client_max_size` bounds what is
kept.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from recipe.sandbox.wire import Invalid

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 30.0
_LARGE_BYTES = 1 << 20
"""Larger bodies are decoded in a thread, since they would block the event loop."""


async def read_bytes(request: web.Request) -> bytes:
    """Return the body. Raises Invalid."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        # SandboxFusion's server reads none either, and a small one may become a large one.
        raise Invalid("send the body without Content-Encoding", status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise Invalid(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
    except web.HTTPRequestEntityTooLarge:
        raise Invalid(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413) from None
    except web.RequestPayloadError:
        raise Invalid("the body does not arrive as its Transfer-Encoding says", 400) from None


async def read_json(request: web.Request) -> Any:
    """Return the decoded body. Raises Invalid with the detail that FastAPI would send."""
    body = await read_bytes(request)
    if not _declares_json(request):
        # FastAPI would decode such a body as one string.
        raise Invalid(
            [
                {
                    "type": "model_attributes_type",
                    "loc": ["body"],
                    "msg": "Input should be a valid dictionary or object to extract fields from "
                    "(send it with Content-Type: application/json)",
                }
            ]
        )
    if not body:
        raise Invalid([{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}])
    try:
        if len(body) > _LARGE_BYTES:
            return await asyncio.to_thread(json.loads, body)
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise Invalid(
            [
                {
                    "type": "json_invalid",
                    "loc": ["body", error.pos],
                    "msg": "JSON decode error",
                    "input": {},
                    "ctx": {"error": error.msg},
                }
            ]
        ) from None
    except (ValueError, RecursionError):
        # Not UTF-8, or nested too deeply.
        raise Invalid("There was an error parsing the body", status=400) from None


def _declares_json(request: web.Request) -> bool:
    # A request without the header, which a web page could send without asking, counts as application/octet-stream.
    kind = request.content_type
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
