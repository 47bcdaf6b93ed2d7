"""A tokenizer whose template renders tools, as a folder, and parquet files of rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Qwen2Tokenizer:
    bpe = Qwen2Tokenizer().backend_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 8,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    learned = bpe.get_vocab(with_added_tokens=False)
    made = Qwen2Tokenizer(learned, [], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def parquet(tmp_path):
    """Writes rows and returns the file's name."""

    def write(rows: list[dict], name: str = "in.parquet", **options) -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name, **options)
        return str(tmp_path / name)

    return write


def read(path: str | Path) -> list[dict]:
    return pq.read_table(path).to_pylist()
