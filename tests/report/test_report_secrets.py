from __future__ import annotations

import pytest

from recipe.dag.report.secrets import command_without_secrets, is_secret, text_without_secrets, without_secrets
from recipe.dag.tools.address import key_from

SECRETS = """token sandbox.token api_key WANDB_KEY OPENAI_API_KEY aws_secret_access_key db-password tokens shop.tokens
access_tokens api_keys secrets passwords Authorization Proxy-Authorization apiKey openaiAPIKey
clientSecret accessToken Ocp-Apim-Subscription-Key ssh_passphrase PGPASSWORD MYSQL_PWD"""
PUBLIC = """max_tokens eos_token tokenizer_path input_key label_key ppo_max_token_len_per_gpu key stop_tokens
max_new_tokens num_batched_tokens skip_special_tokens keys class maxTokens PWD backward_pass monkey"""


@pytest.mark.parametrize(
    ("name", "secret"), [(name, names is SECRETS) for names in (SECRETS, PUBLIC) for name in names.split()]
)
def test_names_of_secrets(name, secret):
    assert is_secret(name) == secret


def test_a_configuration_keeps_all_but_its_secrets():
    config = {
        "sandbox": {"token": "abcdefgh", "url": "https://me:pass@host:8080/run?api_key=k123&n=4", "timeout_s": 20},
        "envs": [{"kwargs": {"password": 1234, "name": "chess"}}, ("a", None, True, 0.5)],
        "data": {"input_key": "problem", "token": None},
        "model": {"api_key": "${oc.env:OPENAI_API_KEY}", "eos_token": "</s>"},
    }
    assert without_secrets(config) == {
        "sandbox": {"token": "***", "url": "https://***@host:8080/run?api_key=***", "timeout_s": 20},
        "envs": [{"kwargs": {"password": "***", "name": "chess"}}, ["a", None, True, 0.5]],
        "data": {"input_key": "problem", "token": None},
        "model": {"api_key": "${oc.env:OPENAI_API_KEY}", "eos_token": "</s>"},
    }
    assert config["sandbox"]["token"] == "abcdefgh", "the run's own is left as it was"


def test_a_text_of_yaml_keeps_its_form():
    text = """\
envs:
  shop: {path: "shop.py:Shop", kwargs: {api_key: "k-1, 2", port: 80}}   # a shop
  bank:
    token: tok123
    password: |
      line 1

      line 2
    client_secret: >-  # folded
      folded
    passphrase: "with \\"quotes\\"
      and lines"
    pin: 1
    secret: ''
    max_tokens: 12
    nested_token:
      name: x
url: "redis://:hunter2@host/0"
key: ${oc.env:API_KEY}
api_key: ${oc.env:API_KEY}
"""
    expected = text.replace('"k-1, 2"', "***").replace("tok123", "***").replace(":hunter2@", "***@")
    expected = expected.replace("|\n      line 1\n\n      line 2", "***")
    expected = expected.replace(">-  # folded\n      folded", "***")
    expected = expected.replace('"with \\"quotes\\"\n      and lines"', "***")
    assert text_without_secrets(text) == expected


def test_values_of_secret_environment_variables_and_keys_of_known_forms_are_hidden_anywhere(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "plain-looking-value")
    monkeypatch.setenv("MY_TOKEN", "plain-looking-value-2")
    monkeypatch.setenv("SHORT_TOKEN", "main")
    monkeypatch.setenv("MODEL_PATH", "/models/main")
    monkeypatch.setenv("MY_SERVER", "value-of-a-key-env")
    assert key_from("MY_SERVER", "api.key_env") and text_without_secrets("value-of-a-key-env") == "***"
    assert text_without_secrets("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----.") == "***."
    text = "at plain-looking-value and plain-looking-value-2 of main in /models/main with hf_" + "a1" * 17
    assert text_without_secrets(text) == "at *** and *** of main in /models/main with ***"
    assert without_secrets({"note": "plain-looking-value"}) == {"note": "***"}


def test_a_command_line_hides_what_is_assigned_and_what_stands_behind_an_option():
    command = ["python", "-m", "recipe.dag.main", "sandbox.token=abc", "+envs.kwargs.api_key=x", "seed=1"]
    assert command_without_secrets([*command, "--api-key", "abc", "--data", "d"]) == [
        *("python", "-m", "recipe.dag.main", "sandbox.token=***", "+envs.kwargs.api_key=***", "seed=1"),
        *("--api-key", "***", "--data", "d"),
    ]


def test_lists_of_secrets_are_hidden_item_by_item_and_numbers_of_tokens_are_kept():
    config = {"api_keys": ["a1", "${oc.env:KEY}", ["b2"]], "tokens": ("t1", 7), "step": {"tokens": 512}, "secrets": []}
    assert without_secrets(config) == {
        "api_keys": ["***", "${oc.env:KEY}", ["***"]],
        "tokens": ["***", 7],
        "step": {"tokens": 512},
        "secrets": [],
    }
    text = """\
shop: {api_keys: [k1, "k 2"], tokens: 512, secrets: []}
bank:
  tokens:
    - t1
    - "t 2"
  next: x
agents:
  token:
  - name: solver
"""
    expected = text.replace('[k1, "k 2"]', "***").replace('\n    - t1\n    - "t 2"', " ***")
    assert text_without_secrets(text) == expected


@pytest.mark.parametrize("scheme", ["Bearer", "Basic"])
def test_credentials_of_a_header_are_hidden_with_their_scheme(scheme):
    assert without_secrets({"headers": {"Authorization": f"{scheme} abc"}}) == {"headers": {"Authorization": "***"}}
    assert without_secrets([f"Authorization: {scheme} abc", "seed: 1"]) == ["Authorization: ***", "seed: 1"]
    assert text_without_secrets(f'{{"Authorization": "{scheme} abc"}}') == '{"Authorization": ***}'
    assert command_without_secrets(["-H", f"Authorization: {scheme} abc"]) == ["-H", "Authorization: ***"]
    kept = f"Authorization: {scheme} ${{oc.env:SHOP}}"
    assert text_without_secrets(kept) == kept


def test_a_password_with_an_at_sign_is_hidden_whole():
    assert text_without_secrets("see http://u:p@ss@host/a and http://v:q@host") == (
        "see http://***@host/a and http://***@host"
    )
    assert text_without_secrets("http://host/a@b") == "http://host/a@b"
