"""Builds a tokenizer for one workflow's dialogues from samples of them.

Invariant: every text can be encoded (byte level). Text that all dialogues share (instructions, fixed parts of answers)
is one token per piece, so a model of a million parameters need not spell it out. Numbers are split into pairs of
digits, so that each number consists of known tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from recipe.tiny.dialogue import Demonstration

CHAT_TEMPLATE = (
    "{% if tools %}{{'START' + 'tools\n'}}{% for t in tools %}{{t | tojson}}{% endfor %}{{'END'}}{% endif %}"
    "{% for m in messages %}{% set role = 'ASSISTANT' if m['role'] == 'assistant' else m['role'] %}"
    "{{'START' + role + '\n' + (m['content'] or '')}}"
    "{% for c in m['tool_calls'] or [] %}{% set a = c['function']['arguments'] %}"
    "{% if m['content'] or not loop.first %}{{'\n'}}{% endif %}"
    "{{'<tool_call>\n{\"name\": \"' + c['function']['name'] + '\", \"arguments\": '}}"
    "{{a if a is string else a | tojson}}{{'}\n</tool_call>'}}{% endfor %}{{'END'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'START' + 'ASSISTANT\n'}}{% endif %}"
)
"""START, END and ASSISTANT are those of a dialect."""
SHORTEST_SEGMENT = 16
"""Characters. Shorter shared pieces are left to byte-pair merges."""
START_OF_TURN, END_OF_TURN, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class Dialect(NamedTuple):
    """How a chat template marks turns."""

    start: str = START_OF_TURN
    end: str = END_OF_TURN
    assistant: str = "assistant"

    def template(self) -> str:
        text = CHAT_TEMPLATE.replace("START", self.start).replace("END", self.end)
        return text.replace("ASSISTANT", self.assistant)


DIALECTS = {"qwen": Dialect(), "gemma": Dialect("<start_of_turn>", "<end_of_turn>", "model")}


def common_segments(demonstrations: list[Demonstration]) -> list[str]:
    """Return the text pieces shared by all dialogues of a role, round, length and turn, for all of these, longest
    first."""
    texts_by_role: dict[tuple[str, int, int], dict[int, list[list[str]]]] = {}
    for demonstration in demonstrations:
        texts = [*_texts(demonstration), demonstration.answer]
        # what a conversation or a tool loop has added makes texts that do not correspond
        role = demonstration.role, demonstration.round, len(texts)
        texts_by_role.setdefault(role, {}).setdefault(demonstration.turn, []).append(texts)
    segments: set[str] = set()
    for by_turn in texts_by_role.values():
        turns = [dialogues[:12] for dialogues in by_turn.values()]
        # Cut at what the turns share: a longer segment of one turn would hide the shorter one of another.
        joint = _common([texts for dialogues in turns for texts in dialogues]) if len(turns) > 1 else []
        for dialogues in turns:
            for piece in _common(dialogues):
                segments.update(_cut(piece, joint))
    return sorted(segments, key=lambda segment: (-len(segment), segment))


def _texts(demonstration: Demonstration) -> list[str]:
    """Return the texts before the answer."""
    return [*(message["content"] for message in demonstration.messages), *demonstration.begun]


def _common(dialogues: list[list[str]]) -> list[str]:
    """Return the pieces that the dialogues share in their first text, second text and so on."""
    common: list[str] = []
    for texts in zip(*dialogues, strict=True):
        pieces = [texts[0]]
        for text in texts[1:]:
            pieces = [part for piece in pieces for part in _shared(piece, text)]
        common += [piece for piece in pieces if len(piece) >= SHORTEST_SEGMENT]
    return common


def _cut(piece: str, separators: list[str]) -> list[str]:
    """Split `piece` at the separators, which are kept; too short rests are dropped."""
    for separator in separators:
        before, match, after = piece.partition(separator)
        if match:
            return [*_cut(before, separators), separator, *_cut(after, separators)]
    return [piece] if len(piece) >= SHORTEST_SEGMENT else []


def _shared(piece: str, text: str) -> list[str]:
    blocks = SequenceMatcher(None, piece, text, autojunk=False).get_matching_blocks()
    return [piece[block.a : block.a + block.size] for block in blocks if block.size >= SHORTEST_SEGMENT]


def build_tokenizer(
    demonstrations: list[Demonstration],
    vocab_size: int = 640,
    segments: Sequence[str] = (),
    dialect: Dialect = DIALECTS["qwen"],
) -> Qwen2Tokenizer:
    """Train a byte-level BPE with Qwen2's pre-tokenizer, the one with which transformers loads every Qwen2 checkpoint,
    whatever its tokenizer.json contains. `segments`: further texts that are one token each, as are tools' schemas."""
    schemas = dict.fromkeys(json.dumps(tool, ensure_ascii=False) for d in demonstrations for tool in d.tools)
    segments = [*segments, *schemas, *common_segments(demonstrations)]
    texts = [m["role"] + "\n" + m["content"] for d in demonstrations for m in d.messages]
    texts += [f"{dialect.assistant}\n" + "".join(d.begun) + d.answer for d in demonstrations]
    for segment in segments:  # a segment is one token; merges inside it would be wasted
        texts = [text.replace(segment, "") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PADDING, dialect.start, dialect.end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = Qwen2Tokenizer().backend_tokenizer
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    options: dict[str, Any] = {"unk_token": None, "eos_token": dialect.end, "pad_token": PADDING}
    merges: Any = [tuple(pair) for pair in learned["merges"]]  # transformers' annotations know neither None nor pairs
    tokenizer = Qwen2Tokenizer(learned["vocab"], merges, **options)
    pairs = [f"{number:02d}" for number in range(100)]
    roles = [f"{role}\n" for role in ("system", "user", dialect.assistant, *(("tools", "tool") if schemas else ()))]
    tokenizer.add_special_tokens({"additional_special_tokens": [dialect.start]})
    added = [AddedToken(text, normalized=False) for text in [*segments, *pairs, *roles]]
    tokenizer.add_tokens(added)  # pyright: ignore[reportArgumentType]  transformers annotates its own AddedToken
    tokenizer.chat_template = dialect.template()
    return tokenizer
