"""Transcripts for supervised fine-tuning: read from parquet, encoded as rollouts are, and dealt out in batches.

Invariant: ids and mask are those of `recipe.dag.episode.transcript`. Every transcript that is left out is counted by
its reason. The batches of a step are a function of seed and step alone, so a resumed run sees the same ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from recipe.dag.core.errors import UserError
from recipe.dag.episode.transcript import ASSISTANT, Encoded, TranscriptEncoder, plain_messages, plain_tools
from recipe.dag.train.packing import PAD, layout
from recipe.dag.types.context import Message

COMPOSED = 4
"""Characters that a normalizer composes to one, at most."""


class Transcript(NamedTuple):
    """One row of a file."""

    messages: Any
    tools: Any
    where: str
    """File and row, for messages."""


def read_transcripts(
    files: str | Sequence[str], *, messages_key: str = "messages", tools_key: str = "tools"
) -> Iterator[Transcript]:
    """Yield the rows of parquet files. Raises UserError for a file that cannot be read or lacks the messages."""
    import pyarrow as pa
    from pyarrow import parquet

    for file in [files] if isinstance(files, str) else files:
        if not Path(file).is_file():
            raise UserError(f"{file}: no such file; pass a parquet file with a column `{messages_key}`")
        try:
            columns = parquet.read_schema(file).names
            if messages_key not in columns:
                raise UserError(
                    f"{file}: no column `{messages_key}` (its columns: {', '.join(columns)}); "
                    "set data.messages_key to the one with the dialogues"
                )
            wanted = [name for name in (messages_key, tools_key) if name in columns]
            rows = parquet.read_table(file, columns=wanted).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from error
        for number, row in enumerate(rows):
            yield Transcript(row[messages_key], row.get(tools_key), f"{file}: row {number}")


class TranscriptDataset(Dataset):
    """The data set of verl's SFT trainer (`data.custom_cls`): encodes all transcripts when it is made."""

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        """`config`: the `data` block. Raises UserError for files, rows and options that cannot be used."""
        self.files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self.max_length, self.truncation = int(config.max_length), config.truncation
        self.rows: list[Encoded] = []
        self.counts: Counter[str] = Counter()
        """Transcripts by what became of them: used, truncated, too long, nothing to learn."""
        self.encoder = TranscriptEncoder(tokenizer, **(config.get("apply_chat_template_kwargs") or {}))
        # a token has at most so many characters, of which a normalizer may have composed each from several
        self._most_characters = self.max_length * COMPOSED * max(map(len, tokenizer.get_vocab()), default=1)
        rows = read_transcripts(self.files, messages_key=config.messages_key, tools_key=config.tools_key)
        for number, transcript in enumerate(rows):
            if 0 <= max_samples <= number:
                break
            self._add(transcript)
        if not self.rows:
            left_out = ", ".join(f"{count} {reason}" for reason, count in self.counts.items()) or "it has no rows"
            raise UserError(f"{', '.join(self.files)}: nothing to train on ({left_out})")

    def _add(self, transcript: Transcript) -> None:
        try:
            messages = plain_messages(transcript.messages)
            if not any(message["role"] == ASSISTANT for message in messages):
                self.counts["without an assistant's message"] += 1
                return
            if self.truncation == "drop" and self._is_endless(messages):
                self.counts["too long"] += 1
                return
            encoded = self.encoder.encode(messages, plain_tools(transcript.tools))
        except UserError as error:
            raise UserError(f"{transcript.where}: {error}") from error
        if len(encoded.ids) > self.max_length:
            encoded = self._shortened(encoded, transcript.where)
        if encoded is None:
            self.counts["too long"] += 1
            return
        encoded = Encoded(encoded.ids, [0, *encoded.mask[1:]])  # nothing before the first token predicts it
        if not any(encoded.mask):
            self.counts["without an answer after truncation"] += 1
        else:
            self.counts["used"] += 1
            self.rows.append(encoded)

    def _is_endless(self, messages: Sequence[Message]) -> bool:
        """Return whether the texts are too long for `max_length` tokens of any kind; encodes nothing."""
        texts = [message["content"] for message in messages]
        for message in messages:
            for call in message.get("tool_calls") or []:
                texts += [value for value in call["function"]["arguments"].values() if isinstance(value, str)]
        return sum(map(len, texts)) > self._most_characters

    def _shortened(self, encoded: Encoded, where: str) -> Encoded | None:
        length, limit = len(encoded.ids), self.max_length
        if self.truncation == "drop":
            return None
        if self.truncation == "error":
            raise UserError(
                f"{where}: {length} tokens, more than data.max_length={limit}; raise it, or set data.truncation to "
                "drop, right or left"
            )
        self.counts["truncated"] += 1
        part = slice(limit) if self.truncation == "right" else slice(length - limit, None)
        return Encoded(encoded.ids[part], encoded.mask[part])

    def summary(self) -> str:
        """Return one line on the transcripts: how many, their tokens, and those left out."""
        tokens, trained = sum(len(row.ids) for row in self.rows), sum(sum(row.mask) for row in self.rows)
        rest = [f"{count:,} {reason}" for reason, count in self.counts.items() if reason != "used"]
        longest = max(len(row.ids) for row in self.rows)
        counted = f"{len(self.rows):,} transcripts, {tokens:,} tokens ({trained / tokens:.0%} trained on)"
        return "; ".join([f"{counted}, longest {longest:,}", *rest])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one transcript as verl's trainer takes it: `input_ids`, `position_ids`, `loss_mask`, each [tokens]."""
        return tensors_of(self.rows[index])


def check_batch_size(batch_size: int, rows: int) -> None:
    """Raise UserError if a batch has more transcripts than there are."""
    if rows < batch_size:
        raise UserError(
            f"data.train_batch_size={batch_size} is more than the {rows} transcripts that can be trained on; set "
            f"data.train_batch_size={rows} or less"
        )


def tensors_of(row: Encoded) -> dict[str, torch.Tensor]:
    """Return the tensors of one transcript, [tokens] each."""
    ids, mask = torch.tensor(row.ids), torch.tensor(row.mask)
    return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


def epoch_batches(rows: int, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Return the full batches of an epoch, as indices of rows. Fewer than `batch_size` rows are left over, in each
    epoch other ones."""
    order = list(range(rows))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return [order[start : start + batch_size] for start in range(0, rows - batch_size + 1, batch_size)]


def share(batch: Sequence[int], lengths: Sequence[int], *, rank: int, ranks: int) -> list[int]:
    """Return the rows of a batch that one of `ranks` processes trains on, with PAD so that all have as many. The shares
    have about the same number of tokens."""
    if ranks == 1:
        return list(batch)
    order, _ = layout(list(lengths), ranks=ranks, mini_batches=1)
    size = len(order) // ranks
    return [PAD if index == PAD else batch[index] for index in order[rank * size : (rank + 1) * size]]


def padding_of(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a short row without loss, in the form of `item`."""
    short = {key: value[..., :2].clone() for key, value in item.items()}
    return short | {"loss_mask": torch.zeros_like(short["loss_mask"])}
