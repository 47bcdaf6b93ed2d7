"""SandboxFusion's requests and answers.

Invariant: a request is checked completely before anything runs, with SandboxFusion's defaults and coercions, and its
errors have the shape of FastAPI's 422. Every outcome of a program is a 200; `SandboxError` means that it never ran.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from recipe.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError

LARGE_BYTES = 1 << 18
_ECHO_BYTES = 4096
"""Values longer than this, as JSON, are not repeated in a 422."""
_FOREIGN = (
    "nodejs", "go", "go_test", "java", "php", "csharp", "typescript", "sql", "rust", "cuda", "lua", "R", "perl", "D_ut",
    "ruby", "scala", "julia", "junit", "kotlin_script", "jest", "verilog", "python_gpu", "lean", "swift", "racket",
)  # fmt: skip
"""Languages that SandboxFusion runs and this server does not."""
if TYPE_CHECKING:
    Language = str
else:
    Language = Literal[(*LANGUAGES, *_FOREIGN)]
Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")


class Invalid(Exception):
    """An invalid request. The answer has `status` and carries `detail`."""

    def __init__(self, detail: Any, status: int = 422):
        super().__init__(str(detail))
        self.detail = detail
        self.status = status


def _unicode(text: str) -> str:
    """Check that a text is valid Unicode. JSON can contain lone surrogates, to which SandboxFusion answers 500."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError(
                "string_unicode", "Input should be valid Unicode: lone surrogate at {at}", {"at": error.start}
            ) from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class Request(BaseModel):
    """A request. Unknown fields are ignored, as in SandboxFusion."""

    model_config = ConfigDict(extra="ignore")


class JobRequest(Request):
    """The fields of a request that runs a program. This server adds `session_id`, the session to run in, and
    `share`, sessions to mount read-only at /in/NAME."""

    memory_limit_mb: int = Field(default=-1, alias="memory_limit_MB")
    """Limit on all processes of the job together. At 0 and below this server's own limit applies; SandboxFusion then
    has none."""
    files: dict[Text, str | None] = Field(default_factory=dict)
    fetch_files: list[Text] = Field(default_factory=list)
    session_id: str | None = None
    share: dict[str, str] = Field(default_factory=dict)


class RunCodeRequest(JobRequest):
    compile_timeout: float = 10
    run_timeout: float = 10
    code: Text
    stdin: Text | None = None
    language: Language
    args: list[Text] = Field(default_factory=list)
    """Arguments of pytest; other languages ignore them."""


def parse(model: type[Model], data: Any) -> Model:
    """Return decoded JSON as a model. Raises Invalid."""
    try:
        # from_attributes as in FastAPI, for the same message if the body is not an object.
        return model.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise Invalid([_problem(dict(item)) for item in error.errors(include_url=False)]) from None


def _problem(item: dict[str, Any]) -> dict[str, Any]:
    item["loc"] = ["body", *item["loc"]]
    try:
        echo = json.dumps(item.get("input"), allow_nan=False)
        if len(echo) > _ECHO_BYTES:
            del item["input"]
    except ValueError:
        item["input"] = repr(item["input"])[:_ECHO_BYTES]
    return item


def check_seconds(name: str, value: float) -> None:
    """Raise SandboxError for a time-out that is NaN."""
    if math.isnan(value):
        raise SandboxError(f"{name} must be a number of seconds, not NaN")


def check_language(language: str) -> None:
    """Raise SandboxError for a language without a runner."""
    if language not in LANGUAGES:
        raise SandboxError(f"language {language!r} has no runner on this server; it runs {', '.join(LANGUAGES)}")


def answer(execution: Execution) -> dict[str, Any]:
    """Return the answer for a program that ran, was stopped, or did not compile."""
    parts = [part for part in (execution.compile, execution.run) if part is not None]
    succeeded = all(part.status == "finished" and part.return_code == 0 for part in parts)
    return _body("Success" if succeeded else "Failed", "", execution)


def refusal(code: str, reason: Exception | str) -> dict[str, Any]:
    """Return the answer for a program that could not be run at all, with SandboxFusion's wording around the reason."""
    return _body("SandboxError", f"exception on running code {code}: {reason} None", Execution(None))


def _body(status: str, message: str, execution: Execution) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": result(execution.compile),
        "run_result": result(execution.run),
        "executor_pod_name": pod_name(),
        "files": files(execution),
    }


def files(execution: Execution) -> dict[str, str]:
    """Return the files by names that are valid Unicode; a program can choose others."""
    return {name.encode("utf-8", "replace").decode(): content for name, content in execution.files.items()}


def pod_name() -> str | None:
    return os.environ.get("MY_POD_NAME")


def result(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {
        "status": "Finished" if outcome.status == "finished" else "TimeLimitExceeded",
        "execution_time": outcome.seconds,
        "return_code": outcome.return_code,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }


async def unblocked(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, in a thread if its input is large, so that it does not hold up the event loop."""
    if size > LARGE_BYTES:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
