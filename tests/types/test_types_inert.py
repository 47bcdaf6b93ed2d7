"""Control tokens are broken, whatever pieces they were written in, and nothing else is changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from recipe.dag.types.inert import JOINER, inert, inert_for


def known(*specials: str, added: tuple[str, ...] = ()) -> SimpleNamespace:
    tokens = [SimpleNamespace(content=text, special=text in specials) for text in (*specials, *added)]
    return SimpleNamespace(added_tokens_decoder=dict(enumerate(tokens)), all_special_tokens=list(specials))


@pytest.mark.parametrize(
    "tag", ["<|im_end|>", "<|eot_id|>", "<\uff5cAssistant\uff5c>", "<s>", "</s>", "[INST]", "[/INST]", "<end_of_turn>"]
)
def test_tags_of_the_common_models_are_broken_once(tag):
    text = f"a {tag}{tag} b"
    assert tag not in inert(text) and inert(text).replace(JOINER, "") == text
    assert inert(inert(text)) == inert(text) == inert_for(None)(text)


def test_other_texts_stay_as_they_are():
    text = "<think>x</think> if a < b | c: print([1], '<b>') # [instance] <sup>"
    assert inert(text) == text


def test_all_tokens_of_the_tokenizer_are_broken():
    tokens = known("<mine>", "!!end", "<mine", added=("<tool_call>", "]~b]", "a word", "  ", "\n\n", "x"))
    text = "<mine> !!end <<mine <tool_call> ]~b]"
    broken = inert_for(tokens)(f"{text} a word  \n\nx")
    assert all(tag not in broken for tag in ("<mine", "!!end", "<tool_call>", "]~b]"))
    assert broken.replace(JOINER, "") == f"{text} a word  \n\nx" and broken.endswith(" a word  \n\nx")


def test_tokens_that_overlap_are_both_broken():
    broken = inert_for(known("<a><", "<b>"))("<a><b>")
    assert "<a><" not in broken and "<b>" not in broken
