from __future__ import annotations

import asyncio
import threading

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe.dag.endpoint import codec
from recipe.dag.endpoint.chat import render, render_off_loop
from recipe.dag.endpoint.codec import TextCodec

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LONG = "One plus two is three. " * 50


def make_tokenizer(kind: type = PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Over lower-case characters, so that decoding does not give back what was encoded."""
    vocabulary = {
        token: number for number, token in enumerate([*SPECIALS, "?", *map(chr, range(10, 65)), *"abcdefghijklmno"])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made = kind(tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=SPECIALS)
    made.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    return made


def encode_all(made: TextCodec, texts: list[str]) -> list:
    async def main() -> list:
        return await asyncio.gather(*(made.encode(text) for text in texts), return_exceptions=True)

    return asyncio.run(main())


def test_ids_are_those_of_the_tokenizer_in_the_order_asked_for():
    tokenizer = make_tokenizer()
    texts = [LONG[:length] + "<|im_start|>Zz" for length in (0, 3, 511, 513, 700, 1100)] * 5
    ids = encode_all(TextCodec(tokenizer), texts)
    assert ids == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(type(row) is list and set(map(type, row)) <= {int} for row in ids)


def test_one_codec_serves_event_loops_in_turn():
    made = TextCodec(make_tokenizer())
    assert encode_all(made, [LONG]) == encode_all(made, [LONG])


def test_long_texts_are_encoded_together_away_from_the_loop(monkeypatch):
    batches = []
    tokenizer = make_tokenizer()
    made = TextCodec(tokenizer)

    class Backend:
        def encode_batch_fast(self, texts, add_special_tokens):
            batches.append((len(texts), threading.current_thread()))
            return tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(codec, "_own_backend", lambda tokenizer: Backend())
    encode_all(made, [LONG] * 20)
    assert sum(count for count, _ in batches) == 20 and len(batches) < 5
    assert all(thread is not threading.main_thread() for _, thread in batches)


def test_a_text_that_cannot_be_encoded_fails_alone():
    good, bad, other = encode_all(TextCodec(make_tokenizer()), [LONG, LONG + "\ud800", LONG])
    assert isinstance(bad, Exception) and good == other and isinstance(good, list)


def test_what_a_hook_sets_on_the_tokenizer_does_not_reach_the_codec():
    tokenizer = make_tokenizer()
    expected, made = tokenizer.encode(LONG, add_special_tokens=False), TextCodec(tokenizer)
    assert encode_all(made, [LONG]) == [expected]
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert encode_all(made, [LONG]) == [expected]


class Shouting(PreTrainedTokenizerFast):
    def encode(self, text, **options):
        return super().encode(text.upper() + "!", **options)

    def decode(self, ids, **options):
        return super().decode(ids, **options) + "!"


def test_a_tokenizer_with_a_way_of_its_own_is_asked_itself():
    tokenizer = make_tokenizer(Shouting)
    made = TextCodec(tokenizer)
    assert not made.direct
    ids = encode_all(made, [LONG])[0]
    assert ids == tokenizer.encode(LONG, add_special_tokens=False)
    assert made.decode(ids, skip_special_tokens=True).endswith("!")


@pytest.mark.parametrize("skip", [True, False])
def test_texts_are_those_of_the_tokenizer(skip):
    tokenizer = make_tokenizer()
    ids = [1, 2, 3, *tokenizer.encode("one, two .", add_special_tokens=False), 2]
    text = TextCodec(tokenizer).decode(ids, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip) and ("<|im_end|>" in text) is not skip


@pytest.mark.parametrize("options", [{}, {"truncation": True, "max_length": 7}])
def test_rendering_off_the_loop_gives_the_same_ids(options):
    tokenizer, messages = make_tokenizer(), [{"role": "user", "content": LONG}]
    found = asyncio.run(render_off_loop(TextCodec(tokenizer), tokenizer, messages, **options))
    assert found == render(make_tokenizer(), messages, **options)
