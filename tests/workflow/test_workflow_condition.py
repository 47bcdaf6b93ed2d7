from __future__ import annotations

import pytest

from recipe.dag.types.context import Output
from recipe.dag.types.values import look_up
from recipe.dag.workflow.condition import Condition, Facts, holds, in_words

SAID = {
    "solve": Output(
        text="The answer is 42.", parsed={"answer": "42", "score": 0.5, "sure": True, "none": None, "n": 3}
    ),
    "check": Output(text="", parsed={"answer": " 42 ", "score": "0.75", "list": [1, 2]}),
    "other": Output(text="no", parsed={"answer": 7}),
}
INFOS = {"solve": {"won": True, "moves": 3, "phase": "end"}}
SAMPLE = {"data_source": "math", "extra_info": {"level": 4, "tags": ["a", "b"]}, "none": None}


def check(**keys) -> bool:
    return holds(Condition(**keys), Facts(SAID, INFOS, SAMPLE, validate=False))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"node": "solve", "key": "answer", "equals": "42"}, True),
        ({"node": "solve", "key": "answer", "equals": 42}, True),
        ({"node": "check", "key": "answer", "equals": "42"}, True),
        ({"node": "solve", "key": "answer", "equals": "43"}, False),
        ({"node": "solve", "key": "sure", "equals": True}, True),
        ({"node": "solve", "key": "sure", "equals": False}, False),
        ({"node": "solve", "key": "n", "equals": True}, False),
        ({"node": "solve", "key": "n", "equals": 3.0}, True),
        ({"node": "other", "equals": "no"}, True),
        ({"node": "other", "key": "answer", "one_of": [1, 7]}, True),
        ({"node": "other", "key": "answer", "one_of": ["x"]}, False),
        ({"node": "solve", "matches": r"answer is \d+"}, True),
        ({"node": "solve", "matches": "^answer"}, False),
        ({"node": "other", "key": "answer", "matches": "^7$"}, True),
        ({"node": "solve", "key": "score", "at_least": 0.5}, True),
        ({"node": "solve", "key": "score", "at_least": 0.6}, False),
        ({"node": "solve", "key": "score", "at_most": 0.5}, True),
        ({"node": "solve", "key": "score", "at_most": 0.0}, False),
        ({"node": "check", "key": "score", "at_least": 0.7, "at_most": 0.8}, True),
        ({"node": "check", "key": "score", "at_least": 0.7, "at_most": 0.74}, False),
        ({"node": "solve", "at_least": 0.0}, False),
        ({"node": "solve", "key": "sure", "at_least": 0.0}, False),
        ({"node": "check", "key": "list", "at_most": 9.0}, False),
        ({"env": "solve", "key": "won", "equals": True}, True),
        ({"env": "solve", "key": "moves", "at_least": 3}, True),
        ({"env": "solve", "key": "phase", "one_of": ["start", "end"]}, True),
        ({"sample": "data_source", "equals": "math"}, True),
        ({"sample": "extra_info.level", "at_least": 4}, True),
        ({"sample": "extra_info.tags.1", "equals": "b"}, True),
        ({"agree": ["solve", "check"]}, True),
        ({"agree": ["solve", "check", "other"]}, False),
        ({"agree": ["solve", "check"], "key": "score"}, False),
    ],
)
def test_each_subject_with_each_test(condition, expected):
    assert check(**condition) is expected
    assert check(none_of=[condition]) is not expected


ABSENT = [
    {"node": "skipped"},
    {"node": "skipped", "key": "answer"},
    {"node": "solve", "key": "missing"},
    {"node": "solve", "key": "none"},
    {"env": "check", "key": "won"},
    {"env": "solve", "key": "missing"},
    {"sample": "missing"},
    {"sample": "none"},
    {"sample": "data_source.deeper"},
    {"sample": "extra_info.tags.2"},
]
TESTS = [
    {"equals": "x"},
    {"equals": False},
    {"one_of": ["x", 0]},
    {"at_least": -9.0},
    {"at_most": 9.0},
    {"matches": ""},
    {"exists": True},
]


@pytest.mark.parametrize("subject", ABSENT, ids=str)
def test_what_is_not_there_fails_every_test_but_one(subject):
    assert [check(**subject, **test) for test in TESTS] == [False] * len(TESTS)
    assert check(**subject, exists=False)


def test_what_is_there_exists():
    for subject in ({"node": "check"}, {"env": "solve", "key": "won"}, {"sample": "extra_info"}):
        assert check(**subject, exists=True) and not check(**subject, exists=False)


def test_nobody_agrees_with_who_said_nothing():
    assert not check(agree=["solve", "skipped"])
    assert not check(agree=["solve", "check"], key="none")
    assert check(agree=["solve"])


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "null"), (True, "true"), (1234567, "1234567"), (10.0, "10"), (1234567.5, "1234567.5"), ("a", "'a'")],
)
def test_every_value_has_words_of_its_own(value, words):
    assert in_words(Condition(node="solve", one_of=[value])).endswith(f"is one of {words}")
    assert in_words(Condition(node="solve", one_of=[10**400])).endswith("0")


def test_conditions_combine():
    yes, no = {"node": "other", "equals": "no"}, {"node": "other", "equals": "yes"}
    assert check(all_of=[yes, yes]) and not check(all_of=[yes, no])
    assert check(any_of=[no, yes]) and not check(any_of=[no, no])
    assert check(none_of=[no, no]) and not check(none_of=[no, yes])
    assert check(all_of=[yes, {"any_of": [no, {"none_of": [no]}]}])


def test_a_phase_is_training_unless_it_is_validation():
    training, validation = Condition(phase="training"), Condition(phase="validation")
    for validate in (False, True):
        facts = Facts({}, {}, {}, validate)
        assert holds(validation, facts) is validate
        assert holds(training, facts) is not validate
        assert holds(Condition(none_of=[{"all_of": [{"phase": "training"}]}]), facts) is validate
    assert check(phase="training")


def test_odd_samples_are_no_error():
    odd = {"blob": b"\x00", "set": {1, 2}, "mixed": {1: "a", "b": 2}}
    facts = Facts({}, {}, odd, validate=False)
    for path in odd:
        assert not holds(Condition(sample=path, equals="x"), facts)
        assert holds(Condition(sample=path, exists=True), facts)
    assert look_up({"a": {"0": "key"}}, "a.0") == "key"
