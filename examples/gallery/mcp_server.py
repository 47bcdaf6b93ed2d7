"""An MCP server over streamable HTTP with two tools: it lists the files of a folder and reads one of them.

    python examples/gallery/mcp_server.py --folder examples/gallery/texts --port 8765

A server of your own is shorter with the package `mcp`; this one shows the whole exchange, and needs aiohttp alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aiohttp import web

VERSION = "2025-06-18"
SERVER = {"name": "notes", "version": "1"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOLS = [
    {"name": "list_notes", "description": "List the names of all notes.", "inputSchema": NO_ARGUMENTS},
    {"name": "read_note", "description": "Read a note.", "inputSchema": NAME, "annotations": {"readOnlyHint": True}},
]


class Notes:
    """The files of a folder, without those of its subfolders."""

    def __init__(self, folder: Path) -> None:
        self.notes = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a tool's call."""
        if name == "list_notes":
            return _text("\n".join(self.notes))
        note = self.notes.get(str(arguments.get("name")))
        return _text(note) if note is not None else _text("There is no such note.", is_error=True)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one message of the protocol. Notifications have no answer."""
        message = await request.json()
        method, params = message.get("method"), message.get("params") or {}
        if "id" not in message:
            return web.Response(status=202)
        if method == "initialize":
            result = {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "serverInfo": SERVER}
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call" and params.get("name") in [tool["name"] for tool in TOOLS]:
            result = self.call(params["name"], params.get("arguments") or {})
        else:
            error = {"code": -32601, "message": f"there is no {method} {params.get('name', '')}".strip()}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


def _text(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def make_app(folder: Path) -> web.Application:
    app = web.Application()
    app.router.add_post("/mcp", Notes(folder).handle)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve the files of a folder as MCP tools.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "texts")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    web.run_app(make_app(options.folder), host="127.0.0.1", port=options.port)
