"""The errors of the sandbox as a run reports them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from recipe.dag.core.errors import SandboxFault, UserError
from recipe.dag.tools.sandbox import Sandbox, serve


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolation": "rlimits"}, "accept that with sandbox.accept_unsandboxed=true"),
        ({"isolation": "none"}, "set sandbox.isolation=rlimits sandbox.accept_unsandboxed=true"),
    ],
)
def test_a_server_that_cannot_start_names_the_keys_of_a_run(options, message):
    with pytest.raises(UserError, match=f"isolation.*; .*{message}$") as error:
        asyncio.run(Sandbox.start(**options))
    assert "\n" not in str(error.value)


def test_a_command_line_that_cannot_be_served_is_the_users_error():
    with pytest.raises(UserError, match="exclude each other"):
        serve(["--no-token", "--token-file", "token"], "verl-dag sandbox serve")


def test_a_server_that_does_not_start_again_is_a_fault(sandbox_level, monkeypatch):
    async def scenario() -> None:
        sandbox = await Sandbox.start(2, **sandbox_level)
        try:
            assert (await sandbox.client.run_code("print(1)")).stdout == "1\n"
            os.kill(sandbox.local.pid, signal.SIGKILL)
            monkeypatch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(SandboxFault, match="did not start"):
                await sandbox.ensure()
        finally:
            await sandbox.close()

    asyncio.run(scenario())
