"""HTTP routes that create, fill, read and delete sessions.

Invariant: a name in a URL reaches only files of that session (see `beneath`), even if a job left symlinks there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from pydantic import Field

from recipe.sandbox import beneath, body, wire
from recipe.sandbox.file_pattern import matches
from recipe.sandbox.guard import client_of
from recipe.sandbox.jobs import MAX_PATIENCE_S, check_share, over_quota
from recipe.sandbox.places import most_entries
from recipe.sandbox.sessions import DEFAULT_QUOTA_MB, DEFAULT_TTL_S, NoSession, Session, Sessions

_LISTED, _LOOKED_AT = 1000, 10_000
"""Limits on the names in an answer, and on the entries that are looked at for it, if its quota allows no more."""


class CreateSession(wire.Request):
    """ttl: seconds without use after which the session is removed. keep: never remove it to make room."""

    ttl: float = Field(default=DEFAULT_TTL_S, allow_inf_nan=False)
    quota_mb: int = DEFAULT_QUOTA_MB
    keep: bool = False


class RenewSessions(wire.Request):
    """ids: of the sessions whose time restarts."""

    ids: list[str]


class SessionRoutes:
    def __init__(self, sessions: Sessions):
        self._sessions = sessions

    def routes(self) -> list[web.RouteDef]:
        file = "/sessions/{id}/files/{name:(?s:.+)}"
        return [
            web.post("/sessions", self.create),
            web.post("/sessions/renew", self.renew),
            web.get("/sessions/{id}", self.show),
            web.delete("/sessions/{id}", self.delete),
            web.post("/sessions/{id}/settle", self.settle),
            web.get("/sessions/{id}/files", self.show),
            web.get(file, self.get_file),
            web.put(file, self.put_file),
            web.delete(file, self.delete_file),
        ]

    async def create(self, request: web.Request) -> web.Response:
        data = await body.read_json(request) if request.body_exists else {}
        wanted = wire.parse(CreateSession, data)
        try:
            session = await self._sessions.create(wanted.ttl, wanted.quota_mb, client_of(request), keep=wanted.keep)
        except ValueError as error:
            raise wire.Invalid(str(error), 400) from None
        return web.json_response(_describe(session), status=201)

    async def renew(self, request: web.Request) -> web.Response:
        wanted, lost = wire.parse(RenewSessions, await body.read_json(request)), 0
        for identifier in wanted.ids:
            try:
                with self._sessions.use(identifier):
                    pass
            except NoSession:
                lost += 1
        return web.json_response({"lost": lost})

    async def show(self, request: web.Request) -> web.Response:
        with self._sessions.use(request.match_info["id"]) as session, _file_errors(session):
            await self._sessions.measure(session)
            patterns, most = request.query.getall("match", []), max(_LOOKED_AT, most_entries(session.quota_bytes))
            files = await asyncio.to_thread(_list, session.place.directory(), patterns, most)
            full = session.place.full or session.used_bytes >= session.quota_bytes
            return web.json_response({**_describe(session), "full": full, "files": files})

    async def delete(self, request: web.Request) -> web.Response:
        await self._sessions.delete(request.match_info["id"])
        return web.json_response({"deleted": True})

    async def settle(self, request: web.Request) -> web.Response:
        async with self._sessions.hold(request.match_info["id"], MAX_PATIENCE_S) as session:
            with _file_errors(session):
                removed = await session.place.settle()
            await self._sessions.measure(session)
        return web.json_response({"removed": [_text(name) for name in removed[:_LISTED]]})

    async def get_file(self, request: web.Request) -> web.Response:
        with self._sessions.use(request.match_info["id"]) as session, _file_errors(session):
            data = await asyncio.to_thread(_read, session.place.directory(), request.match_info["name"])
        return web.Response(body=data, content_type="application/octet-stream")

    async def put_file(self, request: web.Request) -> web.Response:
        data = await body.read_bytes(request)
        async with self._sessions.hold(request.match_info["id"], MAX_PATIENCE_S) as session:
            await self._sessions.measure(session)
            check_share(self._sessions, session)
            with _file_errors(session):
                if not session.place.enforced and session.used_bytes + len(data) > session.quota_bytes:
                    raise OSError(errno.ENOSPC, "over the quota")
                name, folder, offset = request.match_info["name"], session.place, _offset(request)
                if offset:
                    await asyncio.to_thread(beneath.extend_file, folder.directory(), name, data, offset)
                else:
                    await asyncio.to_thread(beneath.write_file, folder.directory(), name, data, folder.owner)
            await self._sessions.measure(session)
        return web.json_response({"bytes": len(data)}, status=201)

    async def delete_file(self, request: web.Request) -> web.Response:
        async with self._sessions.hold(request.match_info["id"], MAX_PATIENCE_S) as session:
            with _file_errors(session):
                await asyncio.to_thread(beneath.delete, session.place.directory(), request.match_info["name"])
            await self._sessions.measure(session)
        return web.json_response({"deleted": True})


def _describe(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "ttl": session.ttl_s,
        "expires_in": round(max(session.left_s, 0.0), 3),
        "quota_bytes": session.quota_bytes,
        "used_bytes": session.used_bytes,
    }


@contextmanager
def _file_errors(session: Session) -> Iterator[None]:
    """Turn errors of a file's name into wire.Invalid."""
    try:
        yield
    except ValueError as error:
        raise wire.Invalid(str(error), 400) from None
    except FileNotFoundError:
        raise wire.Invalid("no such file in the session", 404) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise over_quota(session) from None
        if error.errno in beneath.EXHAUSTED:
            raise wire.Invalid(f"the server cannot open files: {os.strerror(error.errno)}", 503) from None
        raise wire.Invalid(f"not possible in this session: {os.strerror(error.errno or 0)}", 409) from None


def _list(directory: int, patterns: list[str], most: int) -> list[dict[str, Any]]:
    """Return the regular files, or those that match one of the patterns, in the order of their names, at most
    _LISTED of at most `most` entries."""
    files = []
    for name, status in beneath.walk(directory, most):
        text = _text(name)
        if stat.S_ISREG(status.st_mode) and (not patterns or any(matches(text, pattern) for pattern in patterns)):
            files.append({"name": text, "bytes": status.st_size, "modified": status.st_mtime})
            if len(files) == _LISTED:
                break
    return files


def _text(name: str) -> str:
    """Return a name as answers show it."""
    return os.fsencode(name).decode("utf-8", "replace")


def _offset(request: web.Request) -> int:
    text = request.query.get("offset", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise wire.Invalid("offset must be a number of bytes", 400)
    return int(text)


def _read(directory: int, name: str) -> bytes:
    descriptor = beneath.open_file(directory, name)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > body.MAX_BODY_BYTES:
            raise wire.Invalid(f"the file is larger than {body.MAX_BODY_BYTES} bytes; let a job read it in parts", 413)
        return file.read(body.MAX_BODY_BYTES)
