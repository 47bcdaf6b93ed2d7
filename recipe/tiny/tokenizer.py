"""A tokenizer for one workflow's dialogues, made from samples of them.

Invariant: every text can be encoded (byte level). What all dialogues have in common, the roles' instructions and the
frames of their answers, is one token each, so a model of a million parameters need not read or write them letter by
letter; numbers are cut into pairs of digits, so none is unknown.
"""

from __future__ import annotations

import json
from difflib import SequenceMatcher

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from recipe.tiny.dialogue import Demonstration

CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
SHORTEST_SEGMENT = 16
"""Characters; shorter common pieces are left to the merges."""
START_OF_TURN, END_OF_TURN, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def common_segments(demonstrations: list[Demonstration]) -> list[str]:
    """The pieces of text that the dialogues of one role share in a turn, over all roles and turns, longest first."""
    segments: set[str] = set()
    roles: dict[str, dict[int, list[list[str]]]] = {}
    for d in demonstrations:
        turns = roles.setdefault(d.role, {})
        turns.setdefault(d.turn, []).append([*(m["content"] for m in d.messages), d.answer])
    for turns in roles.values():
        first = [dialogues[:12] for dialogues in turns.values()]
        # What the turns share is a segment in each: one that reaches beyond it in one turn would hide another's.
        joint = _common([texts for dialogues in first for texts in dialogues]) if len(first) > 1 else []
        segments.update(part for dialogues in first for piece in _common(dialogues) for part in _cut(piece, joint))
    return sorted(segments, key=lambda s: (-len(s), s))


def _common(dialogues: list[list[str]]) -> list[str]:
    common: list[str] = []
    for texts in zip(*dialogues, strict=True):
        pieces = [texts[0]]
        for text in texts[1:]:
            pieces = [part for piece in pieces for part in _shared(piece, text)]
        common += [piece for piece in pieces if len(piece) >= SHORTEST_SEGMENT]
    return common


def _cut(piece: str, at: list[str]) -> list[str]:
    for part in at:
        before, found, after = piece.partition(part)
        if found:
            return [*_cut(before, at), part, *_cut(after, at)]
    return [piece] if len(piece) >= SHORTEST_SEGMENT else []


def _shared(piece: str, text: str) -> list[str]:
    blocks = SequenceMatcher(None, piece, text, autojunk=False).get_matching_blocks()
    return [piece[b.a : b.a + b.size] for b in blocks if b.size >= SHORTEST_SEGMENT]


def build_tokenizer(demonstrations: list[Demonstration], vocab_size: int = 640) -> Qwen2Tokenizer:
    """Trained with Qwen2's own pre-tokenizer: transformers loads a Qwen2 checkpoint's tokenizer with that, whatever its
    tokenizer.json says."""
    segments = common_segments(demonstrations)
    texts = [m["role"] + "\n" + m["content"] for d in demonstrations for m in d.messages]
    texts += ["assistant\n" + d.answer for d in demonstrations]
    for segment in segments:  # no merges are spent on what is one token anyway
        texts = [text.replace(segment, "") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = Qwen2Tokenizer().backend_tokenizer
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Qwen2Tokenizer(learned["vocab"], merges, unk_token=None, eos_token=END_OF_TURN, pad_token=PADDING)
    pairs = [f"{number:02d}" for number in range(100)]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    tokenizer.add_special_tokens({"additional_special_tokens": [START_OF_TURN]})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*segments, *pairs, *roles]])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
