"""Requests of tools to a service, and the sorting of its failures.

Invariant: what may pass (lost connections, time-outs, overload) is repeated a bounded number of times and ends as a
ToolFault of the infrastructure; what would recur for every request (a wrong key, a redirect) is a UserError; every
other answer is returned. The key leaves this module in one header only: it is removed from everything that is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipe.dag.core.errors import ToolFault, UserError
from recipe.dag.core.http import Answer, HttpClient, Unavailable, retry_after, within
from recipe.dag.tools.address import ServiceOptions, key_from, url_problem

MAX_WAIT_S = 10.0
"""Longest pause before a request is repeated."""
_REFUSING = (401, 402, 403, 407)
_OVERLOADED = (408, 425, 429, 503)
"""The server says that it has not done what was asked."""


class WebService(HttpClient):
    def __init__(self, url: str, options: ServiceOptions, *, where: str):
        """`where`: the tool, for messages. Raises UserError for a text that is not a URL, and a key that is not set."""
        if problem := url_problem(url):
            raise UserError(f"{where}: url: {problem}")
        key, header = key_from(options.key_env, f"{where}: key_env"), options.key_header
        super().__init__(url, where=where, key=key, retries=options.retries, max_wait_s=MAX_WAIT_S)
        self._timeout = within(options.request_timeout_s)
        self._authorization = {header: f"Bearer {key}" if header == "Authorization" else key} if key else {}

    async def send(
        self,
        method: str,
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        once: bool = False,
        **options: Any,
    ) -> Answer:
        """Send a request and return the answer, with any status that says something about this very request.

        repeatable: False if the server must not do it twice: it is then repeated only if the server has not received or
        has refused it. once: never repeat it. options: as in `try_once`.

        Raises ToolFault if all tries fail, and UserError if the service would refuse every request.
        """
        sent = {**(headers or {}), **self._authorization}

        async def attempt(tries: int) -> Answer:
            answer = await self.try_once(method, self.url, headers=sent, timeout=self._timeout, **options)
            return self._checked(replace(answer, body=self.clean(answer.text).encode(), tries=tries))

        try:
            return await self.repeat(attempt, retries=0 if once else None, repeatable=repeatable)
        except Unavailable as error:
            raise ToolFault(f"{self.url}: {error}", where=self.where, infra=True) from None

    def _checked(self, answer: Answer) -> Answer:
        if answer.ok:
            return answer
        status, status_line = answer.status, self.status_line(answer.status, answer.text)
        if status in _OVERLOADED or status >= 500:
            after_s = retry_after(answer.headers.get("Retry-After"))
            raise Unavailable(status_line, after_s=after_s, begun=status not in _OVERLOADED)
        if status in _REFUSING:
            key = "the key" if self._key else "requests without a key (set key_env)"
            raise UserError(f"{self.where}: {self.url} refuses {key} ({status_line})")
        if 300 <= status < 400:
            target = self.clean(answer.headers.get("Location", "another URL"))
            raise UserError(f"{self.where}: {self.url} redirects to {target} (HTTP {status}); write that URL")
        return answer
