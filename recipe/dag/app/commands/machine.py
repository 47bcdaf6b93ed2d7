"""Commands about this machine: serve a model, a script or the sandbox, and check what the machine can do.

Invariant: the first line that a server prints on stdout is its address.
"""

from __future__ import annotations

from typing import Annotated

import typer

from recipe.dag.app.commands.options import ConfigName, ConfigPath, Settings
from recipe.dag.core.errors import UserError


def serve_model(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model: a folder or a hub name.", show_default=False)
    ] = None,
    script: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Serve this function of the messages, not a model.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; the server asks for no key.")] = "127.0.0.1",
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="The name that requests use. (default: MODEL, or the function's)")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option("--max-len", min=2, help="Tokens of prompt and response. (default: at most 8192)")
    ] = None,
    max_requests: Annotated[int, typer.Option("--max-requests", min=1, help="Generations at once; others wait.")] = 64,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
) -> None:
    """Serve a model on the CPU behind OpenAI's interface until SIGTERM or Ctrl-C: /v1/chat/completions,
    /v1/completions, /v1/models and /health. With --script, a Python function answers /v1/chat/completions. The first
    line on stdout is the base URL."""
    from recipe.dag.platform.openai_http import serve

    if (model is None) == (script is None):
        raise UserError("serve: pass either MODEL or --script FILE.py:FUNCTION")
    if script is not None:
        from recipe.dag.platform.script_server import open_script

        unread = {"--max-len": max_len is not None, "--trust-remote-code": trust_remote_code}
        if ignored := [option for option, is_given in unread.items() if is_given]:
            raise UserError(f"{ignored[0]} has no effect with --script; remove it")
        app = open_script(script, name=model_name, max_requests=max_requests).app()
    else:
        from recipe.dag.platform.openai_server import open_server

        assert model is not None  # one of both was given
        limits = {"max_len": max_len, "max_requests": max_requests}
        app = open_server(model, name=model_name, trust=trust_remote_code, **limits).app()
    serve(app, host, port, announce=lambda url: print(f"{url}/v1", flush=True))


def doctor(
    workflow: Annotated[
        str | None, typer.Argument(metavar="[WORKFLOW]", help="Estimate the memory of each GPU.", show_default=False)
    ] = None,
    overrides: Settings = None,
    sandbox_url: Annotated[str | None, typer.Option(help="Run a program on this sandbox server.")] = None,
    sandbox_token: Annotated[
        str | None, typer.Option(envvar="SANDBOX_TOKEN", help="Its token; an argument is visible to all users here.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="List the models of this OpenAI-compatible server.")] = None,
    key_env: Annotated[str, typer.Option(help="Environment variable with its key.")] = "OPENAI_API_KEY",
    model: Annotated[
        str | None, typer.Option(help="Check its chat template, and parse a tool call that the template writes.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --model: histogram of its prompts' lengths, as WORKFLOW renders them.")
    ] = None,
    max_prompt_length: Annotated[int, typer.Option(min=1, help="With --data: the limit, in tokens.")] = 2048,
    gpu_gb: Annotated[float | None, typer.Option(min=1, help="With WORKFLOW: memory of each GPU, GB.")] = None,
    warm: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Train it for one step, which compiles the kernels of later runs."),
    ] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = "dag",
) -> None:
    """Check this machine: one line per check, exit code 1 if a run needs something that is missing. With any option,
    or a workflow, only what they name is checked."""
    from recipe.dag.app.doctor import examine
    from recipe.dag.app.doctor_options import option_checks

    checks = option_checks(
        workflow=workflow,
        sandbox_url=sandbox_url,
        sandbox_token=sandbox_token,
        base_url=base_url,
        key_env=key_env,
        model=model,
        data=data,
        max_prompt_length=max_prompt_length,
        gpu_gb=gpu_gb,
        warm=warm,
        overrides=overrides or [],
        config_path=config_path,
        config_name=config_name,
    )
    if not examine(typer.echo, checks or None):
        raise typer.Exit(1)


def serve_sandbox(context: typer.Context) -> None:
    """Serve SandboxFusion's API until SIGTERM or Ctrl-C; --help lists the options."""
    from recipe.dag.tools.sandbox import serve

    serve(context.args, context.command_path)
