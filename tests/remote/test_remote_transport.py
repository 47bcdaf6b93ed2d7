"""Requests to a server that fails: what is repeated, what ends the run, what is bounded, and where the key is not."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial

import pytest
from aiohttp import web

from recipe.dag.core.errors import ModelServerFault, PromptTooLong, Refused, UserError
from recipe.dag.remote import transport as module
from recipe.dag.remote.ledger import Account
from recipe.dag.remote.openai import room_in
from recipe.dag.remote.transport import Transport
from recipe.dag.types.model import Api, Budget
from tests.remote.openai_server import OpenAIServer

KEY = "sk-quite-secret-key-1234567890"
BODY = {"model": "test", "messages": [{"role": "user", "content": "hi"}]}


def transport(server: OpenAIServer, *, key: str | None = None, url: str | None = None, **limits) -> Transport:
    options = {"retries": 3, "max_wait_s": 0.02, **limits}
    api = Api(base_url=url or server.url, model="test", key_env="THE_KEY" if key else None, **options)
    return Transport(api, url=api.base_url, key=key, where="policy main")


def post(made: Transport, *, timeout_s: float = 20.0, times: int = 1):
    async def main():
        try:
            return await asyncio.gather(
                *(made.post("/chat/completions", BODY, timeout_s=timeout_s) for _ in range(times))
            )
        finally:
            await made.close()

    return asyncio.run(main())


@pytest.mark.parametrize("fault", ["drop", "truncate", "429", "500", "503", "nonsense"])
def test_what_may_pass_is_repeated(fault):
    with OpenAIServer(faults={0: fault, 1: fault}) as server:
        [(answer, tries)] = post(transport(server))
    assert answer["choices"][0]["message"]["content"] == "ok"
    assert tries == 3 and len(server.requests) == 3


@pytest.mark.parametrize("fault", ["drop", "500", "429"])
def test_repetitions_are_bounded_and_end_as_a_fault_of_the_infrastructure(fault):
    with OpenAIServer(faults=lambda number: fault) as server, pytest.raises(ModelServerFault) as failure:
        post(transport(server))
    assert len(server.requests) == 4
    assert failure.value.infra and "(4 tries)" in str(failure.value)


@pytest.mark.parametrize(("fault", "words"), [("401", "refuses"), ("403", "refuses"), ("404", "has no model 'test'")])
def test_what_would_recur_for_every_request_stops_the_run_at_once(fault, words):
    with OpenAIServer(faults={0: fault}) as server, pytest.raises(UserError, match=words) as error:
        post(transport(server))
    assert len(server.requests) == 1 and "\n" not in str(error.value)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_server_that_refuses_its_first_requests_ends_the_run_and_later_refusals_concern_themselves(accepted):
    """As a model that takes no temperature does: a coach with `on_failure: skip` would never score anything."""

    async def main():
        client = transport(server)
        post = partial(client.post, "/chat/completions", BODY, timeout_s=20.0)
        try:
            if accepted:
                await post()
            for _ in range(2 * module._MOST_REFUSED if accepted else module._MOST_REFUSED - 1):
                with pytest.raises(Refused):
                    await post()
            if not accepted:
                with pytest.raises(UserError, match="fault 400.*, and 7 before it; correct the agent's sampling"):
                    await post()
        finally:
            await client.close()

    with OpenAIServer(faults=lambda number: "400" if number or not accepted else None) as server:
        asyncio.run(main())


def test_a_refused_request_is_no_fault_of_the_infrastructure_and_not_repeated():
    with OpenAIServer(faults={0: "400", 1: "long"}) as server:
        with pytest.raises(Refused, match="fault 400") as refused:
            post(transport(server))
        with pytest.raises(PromptTooLong):
            post(transport(server))
    assert len(server.requests) == 2 and not refused.value.infra


@pytest.mark.parametrize(
    ("message", "room"),
    [
        ("This model's maximum context length is 8192 tokens. However, you requested 16689 tokens "
         "(305 in the messages, 16384 in the completion).", 7887),
        ("'max_tokens' is too large: 16384. This model's maximum context length is 8192 tokens and your request has "
         "305 input tokens (16384 > 8192 - 305).", 7887),
        ("Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of "
         "16689 tokens: 305 tokens from the input messages and 16384 tokens for the completion.", 7887),
        ("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.", 0),
        ("the prompt has 9000 tokens, and the maximum context length is 8192", 0),
        ("the request is too long", None),
    ],
)  # fmt: skip
def test_the_room_for_a_completion_is_read_from_the_refusal(message, room):
    assert room_in(message) == room


def waits(monkeypatch) -> list[float]:
    """The pauses, which take no time."""
    asked: list[float] = []
    plain = asyncio.sleep

    async def sleep(seconds: float, result=None):
        if seconds > 0:
            asked.append(seconds)
        await plain(0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    return asked


def test_retry_after_is_honoured(monkeypatch):
    asked = waits(monkeypatch)
    with OpenAIServer(faults={0: "429"}, retry_after="7") as server:
        post(transport(server, max_wait_s=10.0))
    assert len(asked) == 1 and 7.0 <= asked[0] <= 10.0


def test_no_more_requests_at_once_than_allowed():
    async def pause():
        async with asyncio.timeout(60):
            while server.most_in_flight < 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)

    with OpenAIServer(before=pause) as server:
        post(transport(server, max_concurrent=3), times=12)
    assert server.most_in_flight == 3 and len(server.requests) == 12


def test_requests_keep_the_rate(monkeypatch):
    asked = waits(monkeypatch)
    with OpenAIServer() as server:
        post(transport(server, requests_per_minute=60.0), times=4)
    assert len(asked) == 3 and max(asked) == pytest.approx(3.0, abs=0.5)


def test_a_dead_server_gets_no_more_requests_than_probes():
    with OpenAIServer(faults=lambda number: "500") as server:
        made = transport(server, retries=30, max_wait_s=0.05, failures_to_open=4, probe_after_s=30.0)
        with pytest.raises(ModelServerFault, match="no request is sent after 4 failures in a row, the last: HTTP 500"):
            post(made)
    assert len(server.requests) == 4 and made.breaker.is_open


def test_requests_in_the_queue_when_the_circuit_opens_are_not_sent():
    async def pause():
        await asyncio.sleep(0.02)

    with OpenAIServer(faults=lambda number: "500", before=pause) as server:
        made = transport(server, retries=0, max_concurrent=2, failures_to_open=1, probe_after_s=30.0)

        async def main():
            asked = (made.post("/chat/completions", BODY, timeout_s=5.0) for _ in range(12))
            answers = await asyncio.gather(*asked, return_exceptions=True)
            await made.close()
            return answers

        answers = asyncio.run(main())
    assert len(server.requests) <= 2 and made.breaker.opened == 1
    assert sum("no request is sent" in str(answer) for answer in answers) == 12 - len(server.requests)


def test_a_request_that_is_cancelled_while_it_waits_for_the_rate_leaves_room_for_another_probe():
    with OpenAIServer() as server:
        made = transport(server, requests_per_minute=60.0, failures_to_open=1, probe_after_s=0.01)

        async def main():
            entry = made.breaker.enter()
            assert entry is not None
            made.breaker.failed(entry)
            await asyncio.sleep(0.02)
            await made._pace.wait()  # the next request waits a second
            probe = asyncio.create_task(made.post("/chat/completions", BODY, timeout_s=5.0))
            while not made.breaker._probing:
                await asyncio.sleep(0.001)
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            assert made.breaker.enter() is not None
            await made.close()

        asyncio.run(main())
    assert server.requests == []


def test_requests_wait_for_a_server_that_comes_back():
    with OpenAIServer() as server:
        server.kill()
        made = transport(server, retries=200, max_wait_s=5.0, failures_to_open=2, probe_after_s=0.05)

        async def main():
            asked = [asyncio.create_task(made.post("/chat/completions", BODY, timeout_s=5.0)) for _ in range(6)]
            while not made.breaker.is_open:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
            answers = await asyncio.gather(*asked)
            await made.close()
            return answers

        answers = asyncio.run(main())
    assert len(answers) == 6 and len(server.requests) == 6 and not made.breaker.is_open


def test_being_asked_to_slow_down_does_not_open_the_circuit():
    with OpenAIServer(faults=lambda number: "429" if number < 3 else None) as server:
        made = transport(server, failures_to_open=1)
        post(made)
    assert made.breaker.opened == 0


@pytest.mark.parametrize("fault", ["401", "403", "404", "400", "500", "429", "nonsense"])
def test_the_key_is_in_the_header_and_in_no_text(fault, caplog):
    caplog.set_level("DEBUG")
    with OpenAIServer(faults=lambda number: fault) as server:
        made = transport(server, key=KEY)
        with pytest.raises((UserError, ModelServerFault)) as failure:
            post(made)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    texts = [str(failure.value), repr(failure.value), repr(made), caplog.text]
    texts += [str(getattr(failure.value, "record", dict)())]
    assert not any(KEY in text for text in texts)


def test_a_server_that_quotes_a_wrong_key_does_not_put_it_into_the_error():
    with OpenAIServer(key="another") as server:
        made = transport(server, key=KEY)
        with pytest.raises(
            UserError, match="refuses the key in THE_KEY .HTTP 401: Incorrect API key provided"
        ) as error:
            asyncio.run(made.check())
    assert KEY not in str(error.value) and "***" in str(error.value)


@pytest.mark.parametrize("quoted", [KEY, KEY.replace("sk", "\\u0073k")])
def test_an_answer_that_quotes_the_key_is_returned_without_it(quoted):
    class Quoting(OpenAIServer):
        async def _complete(self, request):
            return web.Response(text='{"choices": [{"message": {"content": "' + quoted + '"}}]}')

    with Quoting() as server:
        [(answer, _)] = post(transport(server, key=KEY))
    assert answer == {"choices": [{"message": {"content": "***"}}]}


def test_a_redirect_is_not_followed_since_it_could_take_the_key_elsewhere():
    with OpenAIServer(key=KEY) as server, pytest.raises(UserError):
        post(transport(server, key=KEY, url=server.url.replace("/v1", "/nowhere")))
    assert server.requests == []


def test_what_holds_the_key_does_not_travel_to_other_processes():
    with OpenAIServer() as server, pytest.raises(TypeError, match="holds a key"):
        pickle.dumps(transport(server, key=KEY))


def test_a_check_names_an_unreachable_server_and_accepts_one_without_a_list_of_models():
    with OpenAIServer(models=None) as server:
        asyncio.run(transport(server).check())
        server.kill()
        with pytest.raises(
            UserError, match=r"policy main: .*; start the server, or correct base_url \(http://127"
        ) as error:
            asyncio.run(transport(server, retries=1).check())
    assert "\n" not in str(error.value)


def test_an_answer_without_usage_is_a_warning_where_a_budget_needs_it(caplog):
    class Silent(Transport):
        async def exchange(self, request):
            return {}

    def warnings(**budget) -> int:
        caplog.clear()
        api = Api(base_url="http://x/v1", model="test")
        made = Silent(api, url="http://x/v1", key=None, where="policy main", account=Account(budget=Budget(**budget)))
        post(made, times=2)
        return caplog.text.count("has no usage")

    assert (warnings(tokens=9), warnings(usd=1.0), warnings(calls=9)) == (1, 1, 0)
