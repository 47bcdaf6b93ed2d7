"""The wire formats of Anthropic, Google and Vertex AI: what is sent and read, and failures by the common rules."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.remote import transport as module
from recipe.dag.remote.connect import ApiSpec, Remotes, transport_of
from recipe.dag.remote.google import vertex_url
from recipe.dag.remote.google_token import GoogleTokens
from recipe.dag.types.model import Api
from tests.remote.openai_server import OpenAIServer
from tests.remote.plays import play
from tests.remote.provider_servers import AnthropicServer, GoogleServer, VertexServer

SERVERS = {"anthropic": AnthropicServer, "google": GoogleServer, "vertex": VertexServer}
KEY = "sk-quite-secret-key-1234567890"
HOOK = """
from recipe.dag.types.context import Output
def prompt(context):
    turn = {"role": "user", "content": f"turn {context.turn}"}
    return [turn] if context.turn else [{"role": "system", "content": "Be brief."}, turn]
def parse(context):
    return Output()
"""


@pytest.fixture(params=SERVERS)
def provider(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)


def serve(provider: str, answer: Any = "ok", **options: Any) -> OpenAIServer:
    answered = answer if callable(answer) else lambda body: answer
    return SERVERS[provider](answered, **{"strict": True, "key": KEY, **options})


def flow(world, provider: str, server: OpenAIServer, agent: dict | None = None, api: dict | None = None, **keys):
    options = {"provider": provider, "base_url": server.url, "model": "test", "key_env": "THE_KEY"}
    options |= {"max_wait_s": 0.02, **(api or {})}
    keys = {"nodes": [{"id": "solve"}], **keys}
    return world.workflow(keys.pop("nodes"), agents=[agent or {}], policies={"main": {"api": options}}, **keys)


def hooked(**agent: Any) -> dict[str, Any]:
    """A flow of two turns with a system text; each node keeps its conversation."""
    nodes = [{"id": "solve", "hooks": "h.py"}]
    return {"agent": {"memory": "chat", **agent}, "nodes": nodes, "files": {"h.py": HOOK}, "episode": {"max_turns": 2}}


def test_a_conversation_is_sent_and_recorded_in_one_form(world, provider):
    with serve(provider) as server:
        (episode,) = play(world, flow(world, provider, server, **hooked()))
    assert episode.fault is None
    assert episode.calls[1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "turn 0"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "turn 1"},
        {"role": "assistant", "content": "ok"},
    ]
    assert [call.usage for call in episode.calls] == [
        {"requests": 1, "retries": 0, "prompt_tokens": 7, "completion_tokens": 3}
    ] * 2
    later = server.requests[1]
    if provider == "anthropic":
        said = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
                for m in episode.calls[1].messages[1:4]]  # fmt: skip
        assert (later["system"], later["messages"]) == ("Be brief.", said)
        assert server.headers[0]["anthropic-version"] == "2023-06-01" and later["max_tokens"] == 512
    else:
        roles = {"assistant": "model", "user": "user"}
        said = [{"role": roles[m["role"]], "parts": [{"text": m["content"]}]} for m in episode.calls[1].messages[1:4]]
        assert (later["systemInstruction"], later["contents"]) == ({"parts": [{"text": "Be brief."}]}, said)


def test_sampling_parameters_have_the_providers_names(world, provider):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 9, "stop": ["END"]}
    with serve(provider) as server:
        play(world, flow(world, provider, server, {"sampling": sampling}))
        play(world, flow(world, provider, server))
    sent, plain = server.requests
    if provider == "anthropic":
        named = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 9, "stop_sequences": ["END"]}
        assert {key: sent[key] for key in named} == named
        assert plain.keys() == {"model", "messages", "max_tokens", "temperature"}
    else:
        config = sent["generationConfig"]
        assert 0 <= config.pop("seed") < 2**31
        assert config == {
            **{"temperature": 0.5, "topP": 0.9, "topK": 40},
            **{"maxOutputTokens": 9, "stopSequences": ["END"]},
        }
        assert plain["generationConfig"].keys() == {"temperature", "maxOutputTokens", "seed"}


def asks(provider: str, *codes: str) -> list[dict[str, Any]]:
    """An answer that calls the tool `calc` once for each code, after a thought."""
    if provider == "anthropic":
        thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
        uses = [
            {"type": "tool_use", "id": f"toolu_{k}", "name": "calc", "input": {"code": c}} for k, c in enumerate(codes)
        ]
        return [thought, {"type": "text", "text": "Let me see."}, *uses]
    calls: list[dict[str, Any]] = [{"functionCall": {"name": "calc", "args": {"code": code}}} for code in codes]
    calls[0]["thoughtSignature"] = "c2ln"
    return [{"text": "hm", "thought": True}, {"text": "Let me see."}, *calls]


def messages_in(body: dict[str, Any]) -> list[dict[str, Any]]:
    return body["messages"] if "messages" in body else body["contents"]


def test_tools_are_called_and_answered_and_thoughts_go_back_with_their_calls(world, provider):
    def answer(body):
        return asks(provider, "6*7", "1+1") if len(messages_in(body)) == 1 else "42 and 2"

    agent = {"tools": ["calc"], "tool_loop": {"max_parallel": 2}}
    calc = world.Tool("calc", lambda arguments, state: str(eval(arguments["code"])))
    with serve(provider, answer) as server:
        body = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if provider == "anthropic" else {}
        (episode,) = play(world, flow(world, provider, server, agent, api={"body": body}), [calc])
    (call,) = episode.calls
    assert episode.fault is None and call.text == "42 and 2"
    assert [(result.status, result.text) for result in call.tool_results] == [("success", "42"), ("success", "2")]
    asked = call.messages[1]
    assert (asked["content"], asked["reasoning_content"]) == ("Let me see.", "hm")
    assert [json.loads(each["function"]["arguments"])["code"] for each in asked["tool_calls"]] == ["6*7", "1+1"]
    assert [m["tool_call_id"] for m in call.messages[2:4]] == [each["id"] for each in asked["tool_calls"]]
    first, second = server.requests
    (declared,) = first["tools"] if provider == "anthropic" else first["tools"][0]["functionDeclarations"]
    assert declared["name"] == "calc"
    said, answered = messages_in(second)[1:3]
    if provider == "anthropic":
        assert said["content"] == asks(provider, "6*7", "1+1")
        assert [block["content"] for block in answered["content"]] == ["42", "2"]
    else:
        assert said["parts"] == asks(provider, "6*7", "1+1")[1:]
        assert [part["functionResponse"]["response"] for part in answered["parts"]] == [
            {"result": "42"},
            {"result": "2"},
        ]


def test_calls_that_were_not_run_are_answered_when_the_next_turn_sends_them_again(world, provider):
    def answer(body):
        return asks(provider, "1", "2") if len(messages_in(body)) == 1 else "done"

    agent = {"tools": ["calc"], "tool_loop": {"max_generations": 1}}
    calc = world.Tool("calc", lambda arguments, state: "0")
    with serve(provider, answer) as server:
        (episode,) = play(world, flow(world, provider, server, **hooked(**agent)), [calc])
    assert episode.fault is None and [call.text for call in episode.calls] == ["Let me see.", "done"]


def test_a_tool_call_in_the_text_is_answered_by_the_user(world, provider):
    said = '<tool_call>{"name": "calc", "arguments": {"code": "1+1"}}</tool_call>'
    agent = {"tools": ["calc"], "tool_loop": {}}
    calc = world.Tool("calc", lambda arguments, state: "2")
    with serve(provider, lambda body: said if len(messages_in(body)) == 1 else "2") as server:
        (episode,) = play(world, flow(world, provider, server, agent), [calc])
    assert episode.fault is None and episode.calls[0].text == "2"
    assert "<tool_response>\\n2\\n</tool_response>" in json.dumps(messages_in(server.requests[1])[2])


def test_an_empty_answer_is_left_out_of_the_next_prompt(world, provider):
    with serve(provider, lambda body: "ok" if len(messages_in(body)) > 1 else []) as server:
        (episode,) = play(world, flow(world, provider, server, **hooked()))
    assert episode.fault is None and [call.text for call in episode.calls] == ["", ""]
    assert [message["role"] for message in messages_in(server.requests[1])] == ["user"]


@pytest.mark.parametrize(
    ("provider", "reason", "stop_reason"),
    [
        *(("anthropic", reason, "stop") for reason in ("end_turn", "stop_sequence")),
        *(("anthropic", r, "length") for r in ("max_tokens", "model_context_window_exceeded", "refusal", "pause_turn")),
        ("google", "STOP", "stop"),
        *(("google", reason, "length") for reason in ("MAX_TOKENS", "SAFETY", "RECITATION", "PROHIBITED_CONTENT")),
        ("google", "MALFORMED_FUNCTION_CALL", "length"),
    ],
)
def test_reasons_to_stop_are_those_of_the_engine(world, provider, reason, stop_reason):
    content = {"content": [{"type": "text", "text": "a"}], "stop_reason": reason, "stop_sequence": None}
    parts = {"candidates": [{"content": {"parts": [{"text": "a"}]}, "finishReason": reason}]}
    with serve(provider, content if provider == "anthropic" else parts) as server:
        (episode,) = play(world, flow(world, provider, server))
    assert (episode.fault, episode.calls[0].stop_reason, episode.calls[0].text) == (None, stop_reason, "a")


def test_an_unknown_reason_to_stop_is_a_fault_of_the_server(world, provider):
    content = {"content": [], "stop_reason": "sunset"}
    parts = {"candidates": [{"content": {"parts": []}, "finishReason": "SUNSET"}]}
    with serve(provider, content if provider == "anthropic" else parts) as server:
        (episode,) = play(world, flow(world, provider, server, episode={"retries": 0}))
    assert episode.fault is not None and "sunset" in episode.fault["message"].lower() and episode.fault["infra"]


def test_a_prompt_that_the_content_filter_refuses_is_an_answer_that_nobody_ended(world):
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}}
    with serve("google", blocked) as server:
        (episode,) = play(world, flow(world, "google", server))
    assert (episode.fault, episode.calls[0].text, episode.calls[0].stop_reason) == (None, "", "length")


def test_a_stop_sequence_stays_in_the_text(world):
    content = {"content": [{"type": "text", "text": "a"}], "stop_reason": "stop_sequence", "stop_sequence": "</a>"}
    with serve("anthropic", content) as server:
        (episode,) = play(world, flow(world, "anthropic", server, {"sampling": {"stop": ["</a>"]}}))
    assert episode.calls[0].text == "a</a>"


def test_fields_of_the_body_reach_into_objects(world):
    body = {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}, "seed": None}}
    with serve("google") as server:
        play(world, flow(world, "google", server, api={"body": body}))
    config = server.requests[0]["generationConfig"]
    assert config["thinkingConfig"] == {"thinkingBudget": 0} and "seed" not in config and config["temperature"] == 1.0


@pytest.mark.parametrize("fault", ["drop", "truncate", "429", "500", "503", "529", "nonsense"])
def test_what_may_pass_is_repeated(world, provider, fault):
    with serve(provider, faults={0: fault, 1: fault}) as server:
        (episode,) = play(world, flow(world, provider, server))
    assert episode.fault is None and episode.calls[0].text == "ok"
    assert episode.calls[0].usage is not None and episode.calls[0].usage["requests"] == 3


def test_the_pause_that_a_server_asks_for_is_made(world, provider, monkeypatch):
    pauses: list[float] = []
    plain = asyncio.sleep

    async def sleep(seconds: float, result=None):
        pauses.extend([seconds] if seconds > 0 else [])
        await plain(0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    with serve(provider, faults={0: "429"}, retry_after="7") as server:
        play(world, flow(world, provider, server, api={"max_wait_s": 10.0}))
    assert len(pauses) == 1 and 7.0 <= pauses[0] <= 10.0


def test_a_prompt_beyond_the_context_ends_the_call(world, provider):
    with serve(provider, faults={0: "long"}) as server:
        (episode,) = play(world, flow(world, provider, server))
    assert episode.fault is None and episode.info == {"prompt_too_long": 1}
    assert episode.calls[0].stop_reason == "length" and len(server.requests) == 1


def test_a_completion_that_does_not_fit_is_asked_for_again_with_what_is_left(world):
    with serve("anthropic", faults={0: "crowded"}) as server:
        (episode,) = play(world, flow(world, "anthropic", server))
    assert episode.calls[0].text == "ok" and [body["max_tokens"] for body in server.requests] == [512, 4]


@pytest.mark.parametrize(
    ("fault", "words"), [("quota", "quota is used up"), ("403", "refuses the key in THE_KEY"), ("404", "no model")]
)
def test_what_would_recur_stops_the_run_at_once(world, provider, fault, words):
    with serve(provider, faults=lambda number: fault) as server, pytest.raises(UserError, match=words) as error:
        play(world, flow(world, provider, server))
    assert len(server.requests) == 1 and "\n" not in str(error.value)


def test_a_wrong_key_is_one_line_that_does_not_quote_it(world, provider, caplog):
    caplog.set_level("DEBUG")
    with serve(provider, key="another") as server:
        workflow = flow(world, provider, server)
        for attempt in (lambda: asyncio.run(Remotes(workflow).check()), lambda: play(world, workflow)):
            with pytest.raises(UserError, match="refuses the key in THE_KEY") as error:
                attempt()
            assert KEY not in str(error.value) and "\n" not in str(error.value)
    assert server.headers and any(KEY in value for value in server.headers[0].values())
    assert KEY not in caplog.text


def test_the_key_is_in_no_record_even_if_the_server_quotes_it(world, provider):
    with serve(provider, faults=lambda number: "400") as server:
        server.words = {**server.words, "400": f"bad request of {KEY}"}
        (episode,) = play(world, flow(world, provider, server, episode={"on_user_error": "mask"}))
    record = json.dumps(episode.to_json())
    assert "bad request of ***" in record and KEY not in record


def test_a_ping_uses_the_providers_own_wire(world, provider):
    with serve(provider) as server:
        asyncio.run(Remotes(flow(world, provider, server)).check())
        assert server.requests == []  # it asks for no answer
        server.kill()
        with pytest.raises(UserError, match="start the server, or correct base_url"):
            asyncio.run(Remotes(flow(world, provider, server, api={"retries": 0})).check())


@pytest.mark.parametrize("provider", ["anthropic", "google"])
def test_only_the_providers_own_server_is_asked_for_the_model(world, provider):
    with serve(provider, models=("other",)) as server:
        asyncio.run(Remotes(flow(world, provider, server)).check())
        remotes = Remotes(flow(world, provider, server))
        transport = transport_of(remotes.endpoints["main"])
        transport._api = transport._api.model_copy(update={"base_url": None})
        with pytest.raises(UserError, match="has no model 'test'"):
            asyncio.run(remotes.check())


@pytest.mark.parametrize(
    ("model", "variable", "url", "header"),
    [
        ("gpt-4o-mini", "OPENAI_API_KEY", "https://api.openai.com/v1", "Authorization"),
        ("o3-mini", "OPENAI_API_KEY", "https://api.openai.com/v1", "Authorization"),
        ("claude-sonnet-4-5", "ANTHROPIC_API_KEY", "https://api.anthropic.com/v1", "x-api-key"),
        ("gemini-2.5-flash", "GOOGLE_API_KEY", "https://generativelanguage.googleapis.com/v1beta", "x-goog-api-key"),
    ],
)
def test_the_models_name_tells_provider_url_and_key(model, variable, url, header, monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    spec = ApiSpec("main", Api(model="${oc.env:THE_MODEL}"))
    monkeypatch.setenv("THE_MODEL", model)
    with pytest.raises(UserError, match=re.escape("policies.main.api.key_env: environment variable")):
        spec.endpoint()
    monkeypatch.setenv(variable, KEY)
    made = transport_of(spec.endpoint())
    assert made.url == url and KEY in made.wire.headers(KEY)[header]


def test_openais_own_server_gets_the_newer_name_of_the_length(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    wire = transport_of(ApiSpec("main", Api(model="o3-mini")).endpoint()).wire
    body = wire.body("o3-mini", [], {"temperature": 1.0, "max_tokens": 9})
    assert body["max_completion_tokens"] == wire.max_tokens(body) == 9 and "max_tokens" not in body
    assert wire.limited(body, 4)["max_completion_tokens"] == 4


def test_a_name_that_tells_nothing_is_an_error_at_the_start(monkeypatch):
    monkeypatch.setenv("THE_MODEL", "mistral-large")
    with pytest.raises(UserError, match=r"policies.main.api.provider: the name `mistral-large` does not tell it"):
        ApiSpec("main", Api(model="${oc.env:THE_MODEL}")).endpoint()


@pytest.mark.parametrize(
    ("location", "host"),
    [("us-central1", "us-central1-aiplatform.googleapis.com"), ("global", "aiplatform.googleapis.com")],
)
def test_vertex_has_a_url_of_project_and_location(location, host, monkeypatch):
    spec = ApiSpec("main", Api(provider="vertex", model="gemini-2.5-pro"))
    monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", location)
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", KEY)
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(UserError, match="GOOGLE_CLOUD_PROJECT is not set"):
        spec.endpoint()
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p1")
    made = transport_of(spec.endpoint())
    assert made.url == f"https://{host}/v1/projects/p1/locations/{location}"
    assert made.wire.path("gemini-2.5-pro") == "/publishers/google/models/gemini-2.5-pro:generateContent"
    assert made.wire.headers(KEY) == {"Authorization": f"Bearer {KEY}"}
    assert vertex_url("https://h/v1") == "https://h/v1"
    monkeypatch.setenv("VERTEX_PROJECT", "p2")
    assert "/projects/p2/" in transport_of(spec.endpoint()).url


class Credentials:
    """As google.auth.default returns them: their tokens are t1, t2, ..., each of which lasts an hour."""

    token = expiry = None
    renewals = 0

    def refresh(self, request: object) -> None:
        self.renewals += 1
        self.token = f"{KEY}-t{self.renewals}"
        self.expiry = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)


class GoogleAuthError(Exception):
    retryable = False


@pytest.fixture
def credentials(monkeypatch) -> Credentials:
    """google-auth, with these credentials."""
    made = Credentials()

    def default(scopes: list[str]) -> tuple[Credentials, str]:
        assert scopes == ["https://www.googleapis.com/auth/cloud-platform"]
        return made, "p1"

    missing = type("DefaultCredentialsError", (GoogleAuthError,), {})
    for name, values in {
        "google": {},
        "google.auth": {"default": default},
        "google.auth.exceptions": {"GoogleAuthError": GoogleAuthError, "DefaultCredentialsError": missing},
        "google.auth.transport": {},
        "google.auth.transport.requests": {"Request": object},
    }.items():
        fake = ModuleType(name)
        vars(fake).update(values)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(sys.modules["google"], "auth", sys.modules["google.auth"], raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "account.json")
    monkeypatch.setenv("VERTEX_PROJECT", "p")
    monkeypatch.setenv("VERTEX_LOCATION", "l")
    return made


def test_tokens_of_vertex_are_renewed_before_they_expire_and_when_they_are_refused(credentials):
    async def ask(transport, server) -> str:
        transport.url = server.url
        await transport.post(transport.wire.path("test"), {"contents": []}, timeout_s=20)
        return server.headers[-1]["Authorization"].removeprefix(f"Bearer {KEY}-")

    async def main(server):
        made = transport_of(ApiSpec("main", Api(provider="vertex", model="test")).endpoint())
        seen = [await ask(made, server), await ask(made, server)]
        credentials.expiry -= timedelta(minutes=56)
        seen.append(await ask(made, server))
        server._key = f"{KEY}-t3"  # the second is revoked
        seen.append(await ask(made, server))
        server._key = "none of them"
        with pytest.raises(UserError, match="refuses the token of Google's credentials") as refused:
            await ask(made, server)
        assert KEY not in str(refused.value)
        await made.close()
        return seen

    with VertexServer(key=None) as server:
        assert asyncio.run(main(server)) == ["t1", "t1", "t2", "t3"]
    assert credentials.renewals == 4


@pytest.mark.parametrize(
    ("error", "message"),
    [("DefaultCredentialsError", "set GOOGLE_APPLICATION_CREDENTIALS"), ("GoogleAuthError", "renew the credentials")],
)
def test_credentials_that_give_no_token_are_one_line(credentials, monkeypatch, error, message):
    def refresh(request: object) -> None:
        raise getattr(sys.modules["google.auth.exceptions"], error)("no\nluck")

    monkeypatch.setattr(credentials, "refresh", refresh)
    with pytest.raises(UserError, match=message) as raised:
        asyncio.run(GoogleTokens("policy main").get())
    assert "\n" not in str(raised.value)


def test_without_google_auth_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(UserError, match=r"pip install 'verl-dag\[vertex\]'"):
        asyncio.run(GoogleTokens("policy main").get())
