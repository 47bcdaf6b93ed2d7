"""The tool `search`: looks for passages in a folder of texts, or asks a search service.

Invariant: every call of the model yields a ToolResult; only a failure of the service raises. A folder needs no server
and ranks alike on every machine.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.core.frozen import Mark
from recipe.dag.core.paths import resolve_folder
from recipe.dag.tools.address import HOW_ASKED, ServiceOptions, address_problems
from recipe.dag.tools.base import BuiltinTool, Resources, function_schema
from recipe.dag.types.record import ToolResult

QUERY, TOP_K = "{query}", "{top_k}"
OF_FOLDER = ("folder", "passage_chars", "max_mb")
OF_SERVICE = ("url", "method", "request", "results", "text", "title", *HOW_ASKED)
PROBE = "test"
"""The query that is sent to see whether a service answers in the form that the options describe."""
NOTHING = "No results."


class Search(BuiltinTool):
    """Shows the best passages for a query: number, title and text of each."""

    name = "search"

    class Options(ServiceOptions):
        """`kwargs` in a workflow: `folder` or `url`, with the options of each."""

        called: str = Field(default="search", pattern=r"^[A-Za-z_][\w-]{0,63}$")
        """The name by which the model calls the tool, for agents that have several."""
        top_k: int = Field(default=3, ge=1, le=100)
        """Passages per call."""
        snippet_chars: int = Field(default=500, ge=50)
        """Characters of each passage that the model reads."""
        folder: Annotated[str | None, Mark.CONTENT] = None
        """A folder of .txt, .md and .jsonl files, which are ranked by BM25."""
        passage_chars: int = Field(default=800, ge=50)
        """Longest passage into which a text is cut."""
        max_mb: Annotated[float, Mark.UNLEARNED] = Field(default=64.0, gt=0.0)
        """Largest folder, in millions of bytes."""
        url: str | None = None
        """A service that is asked by HTTP; `${oc.env:NAME}` is read when the run starts."""
        method: Literal["POST", "GET"] = "POST"
        """POST sends `request` as JSON, GET as parameters of the URL."""
        request: dict[str, Any] = {"queries": [QUERY], "topk": TOP_K, "return_scores": True}
        """What is sent; `{query}` and `{top_k}` are replaced. By default the form of Search-R1's server."""
        results: str = "result.0"
        """Where the list of documents is in the answer: keys and positions, with dots between them."""
        text: str = "document.contents"
        """Where its text is in a document; empty if the document is the text."""
        title: str | None = None
        """Where its title is in a document."""

    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words that the passage should contain."}},
        "required": ["query"],
    }

    @classmethod
    def make(cls, options: Options, resources: Resources) -> Search:
        if options.folder is not None:
            return FolderSearch(options, resources.base)
        return ServiceSearch(options, online=resources.online)

    @classmethod
    def problems(cls, options: Options, base: str) -> Iterator[tuple[str, str]]:
        if (options.folder is None) == (options.url is None):
            yield "", "`search` needs either a `folder` of texts or the `url` of a service in its `kwargs`"
            return
        kind, others = ("folder", OF_SERVICE) if options.folder is not None else ("url", OF_FOLDER)
        for key in (key for key in others if key in options.model_fields_set):
            yield key, f"has no effect with `{kind}`; remove it"
        if options.folder is not None:
            try:
                resolve_folder(options.folder, base)
            except UserError as error:
                yield "folder", str(error)
            return
        assert options.url is not None
        yield from address_problems(options.url, options.key_env, "url")
        if QUERY not in json.dumps(options.request):
            yield "request", f"must contain the text {QUERY}, which the model's query replaces"
        if options.method == "GET" and (bad := [key for key, value in options.request.items() if not _is_plain(value)]):
            yield "request", f"with `method: GET`, `{bad[0]}` must be a text, a number or a list of these"

    @classmethod
    def shown_as(cls, kwargs: Mapping[str, Any]) -> str:
        return kwargs.get("called", cls.name)

    def __init__(self, options: Options, description: str) -> None:
        self.options = options
        self.name = options.called
        self.schema = function_schema(self.name, description, self.parameters)

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return ToolResult(self.name, arguments, "invalid", "query must be a text")
        return await self._search(query, arguments)

    @abstractmethod
    async def _search(self, query: str, arguments: dict[str, Any]) -> ToolResult: ...


class FolderSearch(Search):
    """Ranks the passages of a folder by BM25."""

    def __init__(self, options: Search.Options, base: str) -> None:
        """Raises UserError for a folder that cannot be read."""
        from recipe.dag.tools.bm25 import open_index
        from recipe.dag.tools.passages import read_collection

        super().__init__(options, "Search a collection of texts for passages that contain the words of the query.")
        assert options.folder is not None
        collection = read_collection(resolve_folder(options.folder, base), max_mb=options.max_mb)
        self._passages = collection.passages(options.passage_chars)
        self._index = open_index(self._passages, f"{options.passage_chars} {collection.digest}")

    async def check(self) -> str:
        return f"{self.options.folder}: {counted(len(self._passages), 'passage')}"

    async def _search(self, query: str, arguments: dict[str, Any]) -> ToolResult:
        from recipe.dag.tools.bm25 import snippet

        best = [self._passages[number] for number in self._index.search(query, self.options.top_k)]
        limit = self.options.snippet_chars
        text = shown((passage.title, snippet(passage.text, query, limit)) for passage in best)
        return ToolResult(self.name, arguments, "success", text)


class ServiceSearch(Search):
    def __init__(self, options: Search.Options, *, online: bool = True) -> None:
        """Raises UserError for a URL or a key that cannot be used."""
        from recipe.dag.tools.web import WebService

        super().__init__(options, "Search a collection of texts and return the passages that fit the query best.")
        assert options.url is not None
        self._service = WebService(options.url, options, where=f"tool {self.name}") if online else None

    async def check(self) -> str:
        """Send one query, and read the answer as that of a call. Raises UserError."""
        try:
            result = await self._search(PROBE, {})
        except ToolFault as fault:
            raise UserError(f"tool {self.name}: {fault}; start the service, or correct `url`") from None
        finally:
            await self.close()
        if result.status != "success":
            raise UserError(f"tool {self.name}: {self.options.url}: {result.text}; correct `url` or `request`")
        return f"{self.options.url} answers"

    async def _search(self, query: str, arguments: dict[str, Any]) -> ToolResult:
        if self._service is None:
            return ToolResult(self.name, arguments, "success", NOTHING)
        sent = filled(self.options.request, query, self.options.top_k)
        if self.options.method == "GET":
            answer = await self._service.send("GET", params=sent)
        else:
            answer = await self._service.send("POST", json=sent)
        if not answer.ok:
            text = f"the search failed: HTTP {answer.status}: {' '.join(answer.text.split())[:300]}"
            return ToolResult(self.name, arguments, "failed", text, attempts=answer.tries)
        return ToolResult(self.name, arguments, "success", self._read(answer.text), attempts=answer.tries)

    def _read(self, text: str) -> str:
        """Return the documents of an answer for the model. Raises ToolFault if it has another form."""
        options, where = self.options, f"tool {self.name}"
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            message = f"{options.url}: the answer is not JSON: {' '.join(text.split())[:200]!r}"
            raise ToolFault(message, where=where, infra=True) from None
        documents = at(data, options.results)
        if not isinstance(documents, list):
            raise ToolFault(f"{options.url}: no list at `results: {options.results}` in {_outline(data)}", where=where)
        pairs = []
        for document in documents[: options.top_k]:
            body = at(document, options.text)
            if not isinstance(body, str):
                message = f"{options.url}: no text at `text: {options.text or '(empty)'}` in {_outline(document)}"
                raise ToolFault(message, where=where)
            title = at(document, options.title) if options.title is not None else ""
            body = body if len(body) <= options.snippet_chars else body[: options.snippet_chars - 3] + "..."
            pairs.append((str(title or ""), body))
        return shown(pairs)

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()


def shown(documents: Any) -> str:
    """Return (title, text) pairs as the model reads them."""
    parts = [
        f"[{number}] {title}\n{text}" if title else f"[{number}] {text}"
        for number, (title, text) in enumerate(documents, 1)
    ]
    return "\n\n".join(parts) or NOTHING


def filled(template: Any, query: str, top_k: int) -> Any:
    """Return a request with the query and the number of results in place of their names."""
    if isinstance(template, Mapping):
        return {key: filled(value, query, top_k) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, query, top_k) for value in template]
    if template == TOP_K:
        return top_k
    if not isinstance(template, str):
        return template
    # in one pass: a query that contains {top_k} stays as it is
    return query.join(part.replace(TOP_K, str(top_k)) for part in template.split(QUERY))


def at(data: Any, path: str) -> Any:
    """Return what is at a path such as `result.0.text`; None if there is nothing."""
    for part in path.split(".") if path else ():
        if isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return None
    return data


def _outline(data: Any) -> str:
    """Return what an answer consists of, for an error message."""
    if isinstance(data, dict):
        return f"an object with the keys {', '.join(map(str, list(data)[:10])) or 'none'}"
    return f"a list of {len(data)}" if isinstance(data, list) else f"{json.dumps(data)[:80]}"


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values)
