from __future__ import annotations

import pytest

from recipe.dag.workflow.condition import Condition, in_words


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"node": "a", "key": "ok", "equals": True}, "ok of a is true"),
        ({"node": "a", "key": "ok", "equals": 0}, "ok of a is 0"),
        ({"node": "a", "equals": "yes"}, "a is 'yes'"),
        ({"node": "a", "matches": "x+"}, "a matches x+"),
        ({"node": "a", "exists": False}, "a does not exist"),
        ({"env": "a", "key": "level", "at_least": 2}, "level of a's env is at least 2"),
        ({"sample": "extra_info.level", "at_most": 0.5}, "the sample's extra_info.level is at most 0.5"),
        ({"sample": "kind", "one_of": ["x", 1, False]}, "the sample's kind is one of 'x', 1, false"),
        ({"agree": ["a", "b", "c"]}, "a, b and c agree on answer"),
        ({"agree": ["a", "b"], "key": "plan"}, "a and b agree on plan"),
        ({"none_of": [{"phase": "validation"}]}, "not (in validation)"),
        ({"none_of": [{"agree": ["a", "b"]}]}, "not (a and b agree on answer)"),
        (
            {
                "all_of": [
                    {"node": "a", "exists": True},
                    {"any_of": [{"sample": "x", "equals": 1}, {"agree": ["a", "b"]}]},
                ]
            },
            "a exists and (the sample's x is 1 or a and b agree on answer)",
        ),
    ],
)
def test_conditions_are_told_in_words(condition, words):
    assert in_words(Condition.model_validate(condition)) == words
