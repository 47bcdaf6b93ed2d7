"""A Python function in place of a provider's server (`provider: mock`): for tests, and for runs that have none.

Invariant: all but the function's call is that of a server: retries, limits, budget, cache, records. The function gets
its own copy of the messages. What it raises decides: a ModelServerFault or a UserError is what a server's answer would
have been, a lost connection or a time-out is repeated like one, anything else is a mistake in its code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from recipe.dag.core.errors import HookFault, ModelServerFault, UserError, described, is_infrastructure
from recipe.dag.core.http import Unavailable
from recipe.dag.core.location import raised_at
from recipe.dag.core.tasks import invoke
from recipe.dag.remote.ledger import Account
from recipe.dag.remote.transport import Request, Transport
from recipe.dag.types.model import Api


class ScriptTransport(Transport):
    """A Transport that asks a function."""

    def __init__(self, function: Callable[..., Any], *, api: Api, where: str, account: Account) -> None:
        """`function(messages)`, sync or async, returns a text, a message, or a whole completion with `choices`."""
        super().__init__(api, url=api.script or "", key=None, where=where, account=account)
        self._function = function

    async def check(self, timeout_s: float = 30.0) -> None:
        """Do nothing: the function is loaded."""

    async def exchange(self, request: Request) -> dict[str, Any]:
        body, scope = json.loads(request.content or b"{}"), asyncio.timeout(request.timeout_s)
        try:
            async with scope:
                answer = await invoke(self._function, body["messages"])
        except (ModelServerFault, UserError):
            raise
        except Exception as error:
            if scope.expired():
                raise Unavailable(f"no answer within {request.timeout_s:.0f} s") from error
            text = f"{type(error).__name__}: {error}"
            if is_infrastructure(error):
                raise Unavailable(text) from error
            raise HookFault(text, where=self.where, source=raised_at(error)) from error
        return self._completion(answer, body["messages"])

    def _completion(self, answer: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if isinstance(answer, Mapping) and "choices" in answer:
            return dict(answer)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        if not isinstance(message, Mapping):
            raise HookFault(f"the script returned {described(answer)}, not a text or a message", where=self.where)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        # as `verl-dag serve --script` counts: a token is a word
        usage = {"prompt_tokens": sum(_words(each) for each in messages), "completion_tokens": _words(message)}
        return {"choices": [{"index": 0, "message": dict(message), "finish_reason": reason}], "usage": usage}


def _words(message: Mapping[str, Any]) -> int:
    return len(str(message.get("content") or "").split())
