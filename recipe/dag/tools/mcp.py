"""The tools of an MCP server, each shown to the model by the schema that the server lists.

Invariant: every call of the model yields a ToolResult; only a failure of the server raises. What the server lists is
read once, when a run starts, so that all processes of the run show a model the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.core.frozen import Mark
from recipe.dag.core.suggestion import did_you_mean
from recipe.dag.tools.address import HOW_ASKED, ServiceOptions, address_problems
from recipe.dag.tools.base import BuiltinTool, Resources, function_schema
from recipe.dag.types.record import ToolResult

if TYPE_CHECKING:
    from recipe.dag.tools.mcp_client import McpClient

MAX_NAME = 64
"""Characters of a function's name in OpenAI's interface."""
MAX_REFERENCES = 1000
"""References in a schema that are written out, those in what they name included."""
MAX_DEPTH = 100
"""Levels of a schema; chat templates and JSON writers recurse into it."""
OFFLINE = "(no server was asked)"


class Mcp(BuiltinTool):
    """One tool of a server. In a workflow, a placeholder of all its tools, until a run starts and lists them."""

    name = "mcp"

    class Options(ServiceOptions):
        """`kwargs` in a workflow."""

        url: str
        """The server's URL for streamable HTTP, such as http://localhost:8000/mcp; `${oc.env:NAME}` is read when the
        run starts."""
        tools: tuple[str, ...] | None = Field(default=None, min_length=1)
        """The tools that agents have, by their names on the server; by default all."""
        prefix: str = Field(default="", pattern=r"^[\w-]{0,32}$")
        """Written before each name that the model sees."""
        request_timeout_s: Annotated[float, Mark.UNLEARNED] = Field(default=60.0, gt=0.0)
        """Seconds for each request."""
        listed: dict[str, Any] | None = None
        """One tool as the server listed it; set when a run starts."""

    remembers = True  # a server may
    several = True
    parameters: ClassVar[dict[str, Any]] = {}

    @classmethod
    def make(cls, options: Options, resources: Resources) -> Mcp:
        if options.listed is None:
            raise UserError(f"tool mcp: {options.url}: its tools have not been listed")
        client = None
        if resources.online:
            # the tools of one server share its session
            server = options.model_dump_json(include={"url", *HOW_ASKED})
            client = resources.shared.get(server) or resources.shared.setdefault(server, connect(options))
        return cls(options, options.listed, client)

    @classmethod
    def problems(cls, options: Options, base: str) -> Iterator[tuple[str, str]]:
        yield from address_problems(options.url, options.key_env, "url")
        if options.listed is not None:
            yield "listed", "is set when a run starts; remove it (`tools` selects some of the server's tools)"

    @classmethod
    def shown_as(cls, kwargs: Mapping[str, Any]) -> str:
        return shown_name((kwargs.get("listed") or {}).get("name", cls.name), kwargs.get("prefix", ""))

    def __init__(self, options: Options, listed: dict[str, Any], client: McpClient | None) -> None:
        """`client` None: calls are answered without the server. Raises UserError for a schema that no model can be
        shown."""
        self._client, self._called = client, str(listed["name"])
        self.name = shown_name(self._called, options.prefix)
        hints = listed.get("annotations") or {}
        self._repeatable = hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
        description = listed.get("description") or listed.get("title") or self.name
        parameters = without_references(listed["inputSchema"], f"tool {self.name}")
        self.schema = function_schema(self.name, description, parameters)

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        from recipe.dag.tools.mcp_client import McpError

        if self._client is None:
            return ToolResult(self.name, arguments, "success", OFFLINE)
        try:
            result = await self._client.call_tool(self._called, arguments, repeatable=self._repeatable)
        except McpError as error:
            return ToolResult(self.name, arguments, "failed", f"Error: {error}")
        status = "failed" if result.get("isError") is True else "success"
        return ToolResult(self.name, arguments, status, text_of(result) or "(no output)")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def connect(options: Mcp.Options) -> McpClient:
    """Raises UserError for a URL or a key that cannot be used."""
    from recipe.dag.tools.mcp_client import McpClient
    from recipe.dag.tools.web import WebService

    return McpClient(WebService(options.url, options, where="tool mcp"))


async def list_server(options: Mcp.Options) -> list[dict[str, Any]]:
    """Return the tools that the options name, as the server lists them. Raises UserError."""
    client = connect(options)
    try:
        listed = {tool["name"]: tool for tool in await client.list_tools()}
    except ToolFault as fault:
        raise UserError(f"tool mcp: {fault}; start the server, or correct `url`") from None
    finally:
        await client.close()
    if not listed:
        raise UserError(f"tool mcp: {options.url} lists no tools")
    for name in options.tools or ():
        if name not in listed:
            raise UserError(f"tool mcp: {options.url} has no tool `{name}`{did_you_mean(name, listed)}")
    for name in options.tools or listed:  # before anything else recurses into them
        without_references(listed[name]["inputSchema"], f"tool {shown_name(name, options.prefix)}")
    keys = ("name", "title", "description", "inputSchema", "annotations")
    return [{key: listed[name][key] for key in keys if key in listed[name]} for name in options.tools or listed]


def stand_ins(options: Mcp.Options) -> list[dict[str, Any]]:
    """Return made-up descriptions of the tools that the options name, for where no server is asked."""
    return [{"name": name, "inputSchema": {"type": "object"}} for name in options.tools or (Mcp.name,)]


def shown_name(name: str, prefix: str) -> str:
    """Return the name by which models call a tool: in OpenAI's interface it has no dots, slashes or spaces."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", prefix + name)[:MAX_NAME]


def text_of(result: dict[str, Any]) -> str:
    """Return what a model reads of a call's result: its texts, a note for anything else, or its structured content."""
    content = result.get("content")
    parts = [_part(item) for item in content if isinstance(item, dict)] if isinstance(content, list) else []
    if not parts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts).encode("utf-8", "replace").decode()


def _part(item: dict[str, Any]) -> str:
    if item.get("type") == "text":
        return str(item.get("text", ""))
    resource = item.get("resource") if item.get("type") == "resource" else item
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return resource["text"]
    about = resource if isinstance(resource, dict) else item
    return f"[{item.get('type', 'content')} {about.get('uri') or about.get('mimeType') or ''}".rstrip() + ", not shown]"


def without_references(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a JSON schema with each `$ref` replaced by the definition that it names. Raises UserError for one that
    refers to itself, too often, or to another document, and for more than MAX_DEPTH levels."""
    count = 0

    def written_out(value: Any, inside: tuple[str, ...], depth: int) -> Any:
        nonlocal count
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: its schema is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, list):
            return [written_out(item, inside, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        ref = value.get("$ref")
        if not isinstance(ref, str):
            return {key: written_out(item, inside, depth + 1) for key, item in value.items()}
        count += 1
        target = _definition(schema, ref)
        if not isinstance(target, dict):
            raise UserError(f"{where}: its schema refers to {ref}, which it does not define")
        if ref in inside or count > MAX_REFERENCES:
            raise UserError(f"{where}: its schema refers to itself ({ref}), which no model can be shown")
        beside = {key: item for key, item in value.items() if key != "$ref"}
        return written_out({**target, **beside}, (*inside, ref), depth)

    return written_out({key: value for key, value in schema.items() if key not in _UNSHOWN}, (), 0)


_UNSHOWN = ("$schema", "$id", "$defs", "definitions")


def _definition(schema: dict[str, Any], ref: str) -> Any:
    value: Any = schema if ref.startswith("#/") else None
    for part in ref.removeprefix("#/").split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value
