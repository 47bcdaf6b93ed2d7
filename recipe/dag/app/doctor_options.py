"""The checks that options of `verl-dag doctor` ask for: servers, API policies, a model's chat template, a data set's
prompts, memory, one step of training.

Invariant: as in `app/doctor.py`, a check is a function that returns one line or raises. What a check tries is what a
run does: prompts come out of the engine, calls go through the tool loop's parser. Nothing is changed on the machine but
for the caches of kernels that `fill_caches` fills.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recipe.dag.app.doctor import Note, Unfit
from recipe.dag.app.inspection import estimate_gpus, open_planned
from recipe.dag.core.counted import counted
from recipe.dag.core.errors import Fault, UserError
from recipe.dag.loading.edits import Edit, load_edited, split_edits

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.tools.sandbox_client import SandboxClient
    from recipe.dag.workflow.schema import Workflow

TOOL = "code_interpreter"
ARGUMENTS = {"code": 'for i in range(3):\n    print("i:", i)\n'}
"""Line breaks and quotes, which a template has to escape as JSON does."""
BARS = "▁▂▃▄▅▆▇█"
_PLAIN = """\
dag_id: doctor
agents: [{name: solver, policy: main, tools: [code_interpreter], tool_loop: {format: hermes}}]
policies: {main: {model: {path: "-"}, frozen: true}}
nodes: [{id: solve, agent: solver}]
"""
_STEP = {
    "workflow.yaml": """\
dag_id: warm
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}}}
algorithm: {estimator: grpo}
nodes: [{id: solve, agent: solver}, {id: reward, reward: "score.py:score", after: solve}]
""",
    # each group has both rewards, so that each row is trained
    "score.py": "def score(episode): return {'solver': float(episode.index % 2)}\n",
    "problems.jsonl": "".join(f'{{"problem": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(8)),
}
"""The files of the step that `--warm` trains."""
_STEP_SETTINGS = (
    *("data.train_batch_size=8", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1"),
    *("data.max_prompt_length=224", "data.max_response_length=32", "data.val_files=null"),
    *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[console]"),
)


def option_checks(
    *,
    workflow: str | None = None,
    sandbox_url: str | None = None,
    sandbox_token: str | None = None,
    base_url: str | None = None,
    key_env: str = "OPENAI_API_KEY",
    model: str | None = None,
    data: str | None = None,
    max_prompt_length: int = 2048,
    gpu_gb: float | None = None,
    warm: str | None = None,
    overrides: Sequence[str] = (),
    config_path: Path | None = None,
    config_name: str = "dag",
) -> dict[str, Callable[[], str]]:
    """Return name -> check for the options that are not None; {} without any. Raises UserError for options that need
    another one, and for a workflow or settings that a run refuses."""
    if data is not None and model is None:
        raise UserError("--data needs the model whose tokenizer counts; add --model MODEL")
    if warm is not None and workflow is not None:
        if "=" not in workflow and not workflow.startswith("~"):
            raise UserError(f"--warm trains a workflow of its own; remove {workflow}")
        overrides, workflow = [workflow, *overrides], None
    _, edits = split_edits(overrides)
    checks: dict[str, Callable[[], str]] = {}
    if sandbox_url is not None:
        checks["sandbox-url"] = lambda: asyncio.run(ping_sandbox(sandbox_url, sandbox_token))
    if base_url is not None:
        checks["base-url"] = lambda: asyncio.run(ping_server(base_url, key_env))
    if model is not None:
        checks["template"] = lambda: check_template(load_tokenizer(model))
        checks["tool-call"] = lambda: check_tool_call(load_tokenizer(model))
    if data is not None and model is not None:
        checks["prompts"] = lambda: check_prompts(data, load_tokenizer(model), workflow, max_prompt_length, edits)
    if workflow is not None:
        planned = open_planned(workflow, overrides, config_name, config_path, gpu_gb)
        checks["apis"] = partial(check_apis, workflow, edits)
        checks["tools"] = lambda: asyncio.run(ping_tools(workflow, edits))
        checks["gpu-memory"] = partial(check_memory, *planned, model, gpu_gb)
    if warm is not None:
        checks["kernels"] = partial(fill_caches, warm, overrides, config_name, config_path)
    return checks


async def ping_sandbox(url: str, token: str | None) -> str:
    """Run a program on the server. Raises UserError or Unfit if it does not answer or computes something else."""
    from recipe.dag.tools.sandbox_client import SandboxClient, check_sandbox

    await check_sandbox(url, token=token)
    client = SandboxClient(url, token=token, retries=0)
    try:
        result = await client.run_code("print(6 * 7)", timeout_s=20)
    except Fault as fault:
        raise Unfit(f"{url} answers a ping but runs no program: {fault}") from fault
    finally:
        await client.close()
    if result.status != "success" or result.stdout.strip() != "42":
        raise Unfit(f"{url}: print(6 * 7) gave {result.status}: {result.stdout[-200:]!r} {result.stderr[-200:]!r}")
    return f"{url} ran print(6 * 7) in {result.seconds:.2f} s"


async def ping_tools(file: str, edits: Sequence[Edit] = ()) -> str:
    """Ask the servers of a workflow's tools, and read the folders that they search. Raises UserError or Note."""
    from recipe.dag.app.preflight import check_workflow
    from recipe.dag.episode.listed_tools import check_tools, describe_servers, with_listed_tools
    from recipe.dag.episode.make_tools import built_in_tools
    from recipe.dag.episode.rehearsal import NoSandbox
    from recipe.dag.types.tool import close_tool

    workflow = await with_listed_tools(check_workflow(file, edits))
    tools = built_in_tools(workflow, cast("SandboxClient", NoSandbox()), {})
    try:
        reports = [*describe_servers(workflow), *await check_tools(tools)]
    finally:
        for tool in tools.values():
            await close_tool(tool)
    return "; ".join(reports) or "none asks a server or searches a folder"


async def ping_server(url: str, key_env: str) -> str:
    """List the models of an OpenAI-compatible server. Raises Unfit."""
    from recipe.dag.core.http import HttpClient, Unavailable, within

    address = f"{url.rstrip('/')}/models"  # as a policy's client does
    key = os.environ.get(key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = HttpClient(address, where="the server", retries=0, max_wait_s=0.0, key=key)
    try:
        answer = await client.try_once("GET", address, headers=headers, timeout=within(10.0))
    except (Unavailable, UserError) as error:
        raise Unfit(f"{address} does not answer ({error}); start the server") from error
    finally:
        await client.close()
    status = answer.status
    if status in (401, 403):
        state = "refuses its key" if key else "is not set"
        raise Unfit(
            f"{address}: HTTP {status}; the environment variable {key_env} {state} (--key-env VAR names another)"
        )
    if status != 200:
        raise Unfit(f"{address}: HTTP {status}; pass the URL before /chat/completions, such as http://HOST:PORT/v1")
    try:
        names = [str(entry["id"]) for entry in json.loads(answer.body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{address} does not list models as OpenAI's API does") from error
    return f"{address} serves {', '.join(names[:5]) or 'no model'}" + (f" and {len(names) - 5} more" * (len(names) > 5))


def check_apis(file: str, edits: Sequence[Edit] = ()) -> str:
    """Ask the servers of the workflow's API policies, each in its provider's form. Raises UserError."""
    from recipe.dag.remote.connect import Remotes

    remotes = Remotes(load_edited(file, edits))
    if not remotes.specs:
        return "none: every policy is the run's own"
    asyncio.run(remotes.check())
    return "; ".join(f"{name}: {spec.api.title} answers" for name, spec in remotes.specs.items())


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a folder or hub model. Raises Unfit."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
        )
    except (OSError, ValueError) as error:
        raise Unfit(
            f"{model}: no tokenizer can be loaded; pass a model's folder or a hub name like owner/model"
        ) from error


def check_template(tokenizer: Any) -> str:
    """Render an answer and a tool's result as the tool loop does. Raises Unfit."""
    from recipe.dag.endpoint.chat import continuation_ids, end_of_turn_id, ignored_options
    from recipe.dag.types.markup import OPEN_TAG

    if not tokenizer.chat_template:
        raise Unfit("the tokenizer has no chat template; take the model's chat (instruct) version")
    end = end_of_turn_id(tokenizer)
    result = [{"role": "tool", "name": TOOL, "content": "42"}]
    ids = continuation_ids(tokenizer, result, end_of_turn=end)
    text = tokenizer.decode(ids)
    if "42" not in text:
        raise Unfit("the chat template omits a tool's result, so a model would never read it; use format: fenced")
    thinks = ""
    if not ignored_options(tokenizer, {"enable_thinking": True}):
        thinks = "; reads enable_thinking"
    if text.rstrip().endswith(OPEN_TAG):
        thinks += "; every answer begins in a thought"
    cost = f"a tool's result takes {counted(len(ids) - 1, 'token')} besides its own"
    return f"answers end with {tokenizer.decode([end])!r}; {cost}{thinks}"


def check_tool_call(tokenizer: Any) -> str:
    """Render a call with the model's own template and parse it with the tool loop's parser. Raises Unfit or Note."""
    from recipe.dag.episode.rehearsal import NoSandbox
    from recipe.dag.episode.tool_loop import requests_in
    from recipe.dag.tools.code_interpreter import CodeInterpreter
    from recipe.dag.workflow.agent_schema import ToolLoop

    if not tokenizer.chat_template:
        raise Unfit("the tokenizer has no chat template")
    schema = CodeInterpreter(cast("SandboxClient", NoSandbox())).schema
    question = [{"role": "user", "content": "-"}]
    call = {"type": "function", "id": "call_1", "function": {"name": TOOL, "arguments": ARGUMENTS}}
    render = partial(tokenizer.apply_chat_template, tools=[schema], tokenize=False)
    try:
        prompt = render(question, add_generation_prompt=True)
        text = render([*question, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except Exception as error:
        raise Unfit(f"the template cannot render a tool call ({type(error).__name__}: {error})") from error
    if TOOL not in prompt:
        raise Unfit("the template ignores the tools, so a model never sees them; describe them in the prompt")
    written = text.removeprefix(prompt) if text.startswith(prompt) else text.rpartition(question[0]["content"])[2]
    requests = requests_in(written, ToolLoop(), (TOOL,))
    if not requests:
        raise Note(
            f"the template does not write calls in <tool_call> tags ({' '.join(written.split())[:80]!r}); a model that "
            "follows it needs `tool_loop: {format: fenced}`, or SFT in the form of the tool loop"
        )
    request = requests[0]
    if request.problem or request.name != TOOL or request.arguments != ARGUMENTS:
        raise Unfit(f"the template's call is parsed as {request.name}({request.arguments}) {request.problem}")
    return f"a call of {TOOL} that the template wrote is parsed with its arguments unchanged"


def check_prompts(data: str, tokenizer: Any, workflow: str | None, limit: int, edits: Sequence[Edit] = ()) -> str:
    """Return the histogram of the first prompts' lengths in tokens, as the engine renders them: with the agent's
    messages (of `workflow`, else the row's), the chat template and the schemas of the tools.

    Raises Unfit if no prompt can be rendered, UserError for data that cannot be read."""
    from recipe.dag.episode.first_prompt import FirstPrompts, PromptError
    from recipe.dag.episode.listed_tools import with_listed_tools
    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.train.data import load_samples

    flow = load_edited(workflow, edits) if workflow else load_workflow("doctor.yaml", _PLAIN)
    prompts = FirstPrompts(asyncio.run(with_listed_tools(flow)), tokenizer)
    samples = load_samples(data, what="--data")

    async def measure() -> tuple[list[int], list[str]]:
        lengths, errors = [], []
        for sample in samples:
            try:
                lengths.append(len(await prompts.ids(sample)))
            except (PromptError, UserError) as error:
                errors.append(str(error))
        return lengths, errors

    lengths, errors = asyncio.run(measure())
    if not lengths:
        raise Unfit(f"{data}: none of {counted(len(samples), 'prompt')} can be rendered: {errors[0]}")
    failed = f"; {counted(len(errors), 'row')} cannot be rendered ({errors[0][:80]})" if errors else ""
    return f"{describe_lengths(lengths, limit)}{failed}"


def describe_lengths(lengths: Sequence[int], limit: int, bins: int = 16) -> str:
    """Return one line: percentiles, the share above `limit`, and a histogram of `bins` equal bins from the shortest to
    the longest."""
    ordered = sorted(lengths)
    # nearest rank: an actual length, at least q of all are not longer
    ranks = {q: ordered[max(0, -(-len(ordered) * q // 100) - 1)] for q in (50, 90, 95, 99)}
    low, high = ordered[0], ordered[-1]
    counts = [0] * bins
    for length in ordered:
        counts[min((length - low) * bins // max(high - low, 1), bins - 1)] += 1
    most = max(counts)
    # a bin that is not empty has a bar, however few it holds
    bars = "".join(" " if not n else BARS[(n * (len(BARS) - 1) + most - 1) // most] for n in counts)
    over = sum(length > limit for length in ordered)
    percentiles = ", ".join(f"p{q} {value:,}" for q, value in ranks.items())
    return (
        f"{len(ordered):,} prompts of {low:,} |{bars}| {high:,} tokens; {percentiles}; "
        f"{over / len(ordered):.1%} above {limit:,}"
    )


def check_memory(
    workflow: Workflow, config: DictConfig | None, model: str | None = None, gpu_gb: float | None = None
) -> str:
    """Estimate the memory of each GPU. `model`: the value of MODEL_PATH if the configuration has none. Raises Unfit if
    the run does not fit, Note if nothing can be estimated."""
    if model is not None and not (config is not None and config.model_path):
        os.environ["MODEL_PATH"] = model
    estimate = estimate_gpus(workflow, config, gpu_gb)
    if "no_gpus" in estimate:
        raise Note(estimate["no_gpus"])
    lines = [f"{', '.join(pool.policies)} on {counted(pool.gpus, 'GPU')}: {pool.verdict}" for pool in estimate["gpus"]]
    if not all(pool.fits for pool in estimate["gpus"]):
        raise Unfit("; ".join(lines))
    return "; ".join(lines)


def fill_caches(model: str, overrides: Sequence[str], config_name: str = "dag", config_path: Path | None = None) -> str:
    """Train `model` for one step in a temporary folder, as a run does, so that later runs find their kernels compiled.
    The weights are discarded; the folder stays if the step fails, with its logs. Raises what a run raises."""
    from recipe.dag.app.evaluate import option
    from recipe.dag.app.launch import launch

    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="verl-dag-warm-"))
    output = folder / "run"
    for name, text in _STEP.items():
        (folder / name).write_text(text)
    paths = {"workflow": folder / "workflow.yaml", "data.train_files": folder / "problems.jsonl", "model_path": model}
    settings = [option(key, value) for key, value in (paths | {"output_dir": output}).items()]
    try:
        launch(config_name, [*settings, *_STEP_SETTINGS, *overrides], config_path)
        shutil.rmtree(output, ignore_errors=True)  # it is not there if `overrides` name another
    finally:
        if not output.exists():
            shutil.rmtree(folder)
    home = Path.home()
    caches = (
        Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
        Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", home), ".cache", "flashinfer"),
        Path(os.environ.get("TVM_FFI_CACHE_DIR", home / ".cache" / "tvm-ffi")),
    )
    filled = ", ".join(str(path) for path in caches if path.is_dir())
    where = f"kernels are in {filled}" if filled else "no kernel was compiled"
    return f"one step took {time.monotonic() - started:.0f} s; {where}"
