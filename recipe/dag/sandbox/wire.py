"""SandboxFusion's requests and answers.

Invariant: a request is checked whole before anything runs, with SandboxFusion's defaults and coercions, and what is
wrong with it has the shape of FastAPI's 422. Every outcome of a program is a 200; `SandboxError` means that it never
ran.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from recipe.dag.sandbox.outcome import LANGUAGES, Execution, Outcome, SandboxError

MAX_RUN_S = 3600.0
_ECHO_BYTES = 4096
"""How much of a wrong value a 422 repeats."""
MISSING = {
    "nodejs": "Node.js",
    "go": "a Go toolchain",
    "go_test": "a Go toolchain",
    "java": "a JDK",
    "php": "PHP",
    "csharp": ".NET",
    "typescript": "Node.js with TypeScript",
    "sql": "a SQL engine",
    "rust": "a Rust toolchain",
    "cuda": "the CUDA compiler and a GPU",
    "lua": "Lua",
    "R": "R",
    "perl": "Perl",
    "D_ut": "a D compiler",
    "ruby": "Ruby",
    "scala": "Scala",
    "julia": "Julia",
    "pytest": "a pytest runner",
    "junit": "a JDK with JUnit",
    "kotlin_script": "Kotlin",
    "jest": "Node.js with Jest",
    "verilog": "Icarus Verilog",
    "python_gpu": "a GPU inside the sandbox",
    "lean": "Lean",
    "swift": "Swift",
    "racket": "Racket",
}
"""What SandboxFusion runs and this server does not: what each would need."""
Language = Literal[(*LANGUAGES, *MISSING)]  # type: ignore[valid-type]
Model = TypeVar("Model", bound=BaseModel)


class Invalid(Exception):
    """`detail` is what the answer with `status` carries."""

    def __init__(self, detail: Any, status: int = 422):
        super().__init__(str(detail))
        self.detail = detail
        self.status = status


def _unicode(text: str) -> str:
    """JSON can spell half a character, which no file or pipe can hold; SandboxFusion answers that with a 500."""
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
    """Unknown fields are ignored, as SandboxFusion does."""

    model_config = ConfigDict(extra="ignore")


class RunCodeRequest(Request):
    """`session_id` and `share` are this server's own: the working directory that lasts, and sessions to read at
    /in/NAME."""

    compile_timeout: float = 10
    run_timeout: float = 10
    memory_limit_MB: int = -1
    """Of the job and all its processes. 0 and below: this server's own limit, where SandboxFusion has none."""
    code: Text
    stdin: Text | None = None
    language: Language
    files: dict[Text, str | None] = Field(default_factory=dict)
    fetch_files: list[Text] = Field(default_factory=list)
    session_id: str | None = None
    share: dict[str, str] = Field(default_factory=dict)


class RunJupyterRequest(Request):
    cells: list[Text]
    cell_timeout: float = 0
    """Seconds; 0 and below: none."""
    total_timeout: float = 45
    memory_limit_MB: int = -1
    kernel: Literal["python3"] = "python3"
    files: dict[Text, str | None] = Field(default_factory=dict)
    fetch_files: list[Text] = Field(default_factory=list)
    session_id: str | None = None
    share: dict[str, str] = Field(default_factory=dict)


def parse(model: type[Model], data: Any) -> Model:
    """Check decoded JSON. Raises Invalid."""
    try:
        # As FastAPI does it, for the same words where the body is no object.
        return model.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise Invalid([_problem(dict(item)) for item in error.errors()]) from None


def _problem(item: dict[str, Any]) -> dict[str, Any]:
    item["loc"] = ["body", *item["loc"]]
    item.pop("ctx", None)
    try:
        echo = json.dumps(item.get("input"), allow_nan=False)
        if len(echo) > _ECHO_BYTES:
            del item["input"]
    except ValueError:
        item["input"] = repr(item["input"])[:_ECHO_BYTES]
    return item


def check_seconds(name: str, value: float) -> None:
    """Raises SandboxError for a time-out that is not a number."""
    if math.isnan(value):
        raise SandboxError(f"{name} must be a number of seconds, not NaN")


def check_language(language: str) -> None:
    """Raises SandboxError that names what the language would need."""
    if language in MISSING:
        raise SandboxError(
            f"language {language!r} needs {MISSING[language]}, which this server does not run; "
            f"it runs {', '.join(LANGUAGES)}"
        )


def answer(execution: Execution) -> dict[str, Any]:
    """The body for a program that ran, was stopped, or did not compile."""
    return _body(status_of(execution), "", execution.compile, execution.run, execution.files)


def status_of(execution: Execution) -> str:
    parts = [part for part in (execution.compile, execution.run) if part is not None]
    fine = all(part.status == "finished" and part.return_code == 0 for part in parts)
    return "Success" if fine else "Failed"


def refusal(code: str, reason: Exception | str) -> dict[str, Any]:
    """The body for a program that could not be run at all, with SandboxFusion's wording around the reason."""
    return _body("SandboxError", f"exception on running code {code}: {reason} None", None, None, {})


def _body(
    status: str, message: str, compiled: Outcome | None, run: Outcome | None, files: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": result(compiled),
        "run_result": result(run),
        "executor_pod_name": pod_name(),
        "files": dict(files),
    }


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
