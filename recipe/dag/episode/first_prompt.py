"""The first prompt of an episode, without a model: to count its tokens before a run.

Invariant: the prompt is built by the engine itself, that is by the agent's hook, chat template and tool schemas, and
the episode ends where the policy would be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.listed_tools import with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.rehearsal import CharacterTokenizer, NoSandbox
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.record import Generation
from recipe.dag.workflow.schema import Workflow

_NO_LIMIT = 1 << 40
"""Tokens. No prompt is too long to be counted."""


class _NoModel:
    """A GenerationClient that ends each episode at its first request."""

    repeats = True  # or the engine would wait and ask again

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        raise ModelServerFault("there is no model")


class MessageRecorder(CharacterTokenizer):
    """A tokenizer that keeps the messages and tool schemas of the last prompt that it rendered, for callers that want
    these and no ids."""

    messages: list[dict[str, Any]] = []
    schemas: list[dict[str, Any]] = []

    def apply_chat_template(
        self,
        conversation: Iterable[Mapping[str, Any]],
        tools: Iterable[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        self.messages = [dict(message) for message in conversation]
        self.schemas = [dict(schema) for schema in tools or ()]
        return super().apply_chat_template(self.messages, self.schemas, **options)


class PromptError(Exception):
    """The engine cannot build the prompt of this sample; the text is the reason."""


class FirstPrompts:
    """Builds the first prompts of a workflow's episodes for one tokenizer."""

    def __init__(self, workflow: Workflow, tokenizer: Any) -> None:
        """All policies use `tokenizer`. Raises UserError for hooks, tools or a chat template that cannot work."""
        masked = {"on_failure": "mask", "on_user_error": "mask", "retries": 0}
        workflow = workflow.model_copy(update={"episode": workflow.episode.model_copy(update=masked)})
        workflow = with_stand_ins(workflow)
        endpoint = PolicyEndpoint(_NoModel(), tokenizer, _NO_LIMIT)
        self.encode = endpoint.codec.encode
        """Returns the token ids of a text without special tokens around it."""
        sandbox = cast(SandboxClient, NoSandbox())
        endpoints = dict.fromkeys(workflow.policies, endpoint)
        self._runner = EpisodeRunner(
            workflow, endpoints, make_tools(workflow, sandbox, online=False), seed=0, sandbox=sandbox
        )

    async def ids(self, sample: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the first prompt. Raises PromptError."""
        try:
            episode = await self._runner.run(dict(sample), "first_prompt", 0, step=0)
        except UserError as error:
            raise PromptError(str(error)) from error
        fault = episode.fault
        if fault is not None and fault["boundary"] == ModelServerFault.boundary:
            return list(episode.calls[0].prompt_ids)
        if fault is None:
            raise PromptError("the episode ends before an agent is asked")
        raise PromptError(f"{fault['where']}: {fault['message']}" if fault["where"] else fault["message"])
