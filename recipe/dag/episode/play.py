"""Plays one episode with a Python function or a server's model in place of every policy: `verl_dag.play`.

Invariant: the engine of a run plays it, with the workflow's hooks, tools, envs and rewards; it is played once, and a
failure that would end it is an error. A function plays any workflow, since its tokens are characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recipe.dag.core.errors import HookFault, boundary, described
from recipe.dag.core.tasks import invoke
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.listed_tools import with_listed_tools
from recipe.dag.episode.make_tools import make_tools, uses_sandbox
from recipe.dag.episode.rehearsal import MAX_TOKENS, CharacterTokenizer, strict, with_all_tokens
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.connect import Remotes
from recipe.dag.tools.sandbox import Sandbox
from recipe.dag.types.model import Api
from recipe.dag.types.record import Episode, Generation
from recipe.dag.types.tool import close_tool
from recipe.dag.workflow.agent_schema import Policy
from recipe.dag.workflow.schema import Workflow


class FunctionClient:
    """A GenerationClient that asks a function of the messages for the text."""

    repeats = True  # the same question would get the same error

    def __init__(self, function: Callable[..., Any], tokenizer: CharacterTokenizer) -> None:
        self._function, self._tokenizer = function, tokenizer

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        with boundary(HookFault, "model", self._function):
            text = await invoke(self._function, self._tokenizer.messages(prompt_ids))
            if not isinstance(text, str):
                raise HookFault(f"returned {described(text)}, not a text")
        ids = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id][: sampling["max_tokens"]]
        return Generation(ids, [0.0] * len(ids), "stop" if ids[-1] == self._tokenizer.eos_token_id else "length")


async def play_episode(
    workflow: Workflow,
    sample: dict[str, Any],
    model: Callable[..., Any] | str,
    *,
    server: Mapping[str, Any],
    sandbox: Mapping[str, Any],
    seed: int,
) -> Episode:
    """Return one finished episode, with its rewards. `model`: a function, or the URL of a server, whose further fields
    of `Api` are in `server`. `sandbox`: options of `Sandbox.start`. Raises UserError."""
    workflow = await with_listed_tools(strict(workflow))
    remotes = None
    if isinstance(model, str):
        policy = Policy(api=Api(base_url=model, **server))
        workflow = workflow.model_copy(update={"policies": dict.fromkeys(workflow.policies, policy)})
        remotes = Remotes(workflow)
    else:
        workflow, tokenizer = with_all_tokens(workflow), CharacterTokenizer()
        endpoint = PolicyEndpoint(FunctionClient(model, tokenizer), tokenizer, MAX_TOKENS)
    started = await Sandbox.start(**sandbox) if uses_sandbox(workflow) else None
    client, tools = started and started.client, {}
    try:
        tools = make_tools(workflow, client)
        endpoints = dict.fromkeys(workflow.policies, endpoint) if remotes is None else remotes.endpoints
        runner = EpisodeRunner(workflow, endpoints, tools, seed=seed, sandbox=client)
        episode = await runner.run(sample, "played", 0, step=0)
        await runner.finish([episode], "play")
    finally:
        for tool in tools.values():
            await close_tool(tool)
        if remotes is not None:
            await remotes.close()
        if started is not None:
            await started.close()
    return episode
