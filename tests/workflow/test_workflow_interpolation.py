from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.interpolation import check_env, resolve_env

ENVIRON = {"HOME_OF_MODELS": "/models", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain/path", "plain/path"),
        ("$HOME and {braces} stay", "$HOME and {braces} stay"),
        ("${oc.env:HOME_OF_MODELS}/tiny", "/models/tiny"),
        ("${oc.env:EMPTY,default}", ""),
        ("${oc.env:MISSING,default}", "default"),
        ("${oc.env:MISSING,a,b}", "a,b"),
        ("${oc.env:MISSING,}", ""),
        ("${oc.env:MISSING,${oc.env:HOME_OF_MODELS}/x}", "/models/x"),
        ("${oc.env:MISSING,${oc.env:ALSO,deep}}!", "deep!"),
    ],
)
def test_variables_and_defaults_are_put_in(text, value):
    assert check_env(text) is None
    assert resolve_env(text, environ=ENVIRON) == value


def test_a_variable_that_is_not_set_is_named_with_who_needs_it():
    with pytest.raises(UserError) as caught:
        resolve_env("${oc.env:MODEL_PATH}", "policies.main.model.path", environ={})
    assert str(caught.value) == "environment variable MODEL_PATH is not set; policies.main.model.path needs it"


def test_a_default_is_not_looked_up_when_the_variable_is_set():
    assert resolve_env("${oc.env:HOME_OF_MODELS,${oc.env:MISSING}}", environ=ENVIRON) == "/models"


@pytest.mark.parametrize(
    "text",
    [
        "${MODEL}",
        "${oc.env:}",
        "${oc.env:A B}",
        "${oc.env:A",
        "${oc.env:A,b",
        "${oc.env:A,${oc.env:B}",
        "${oc.env:A,${B}}",
        "${oc.env:1A}",
    ],
)
def test_other_forms_are_refused(text):
    assert check_env(text)
    with pytest.raises(UserError, match="where"):
        resolve_env(text, "where", environ={"A": "x", "B": "y"})


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("VERL_DAG_TEST", "here")
    assert resolve_env("${oc.env:VERL_DAG_TEST}") == "here"
