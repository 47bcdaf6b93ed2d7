from __future__ import annotations

import collections

import pytest
import torch
from omegaconf import OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.train.packing import PAD
from recipe.dag.train.sft.compose import compose_sft
from recipe.dag.train.sft.data import TranscriptDataset, epoch_batches, padding_of, share, tensors_of
from tests.dialogues import LLAMA, SCHEMA, call_of, dialogue, tokenizer, with_text_arguments, write_parquet

TRANSCRIPTS = 200
KEYS = ("input_ids", "loss_mask")


def options(**keys):
    config = compose_sft(["data.train_files=x", "model.path=m", "output_dir=o"]).data
    return OmegaConf.merge(config, keys)


def of_verl(path, made, **keys):
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    config = OmegaConf.create({"pad_mode": "no_padding", "max_length": 65_536, "truncation": "error", **keys})
    return MultiTurnSFTDataset(path, made, config)


@pytest.fixture(scope="module")
def made():
    return tokenizer()


@pytest.fixture(scope="module")
def both(made, tmp_path_factory):
    """This project's data set and verl's over the same file."""
    path = write_parquet(
        tmp_path_factory.mktemp("data") / "train.parquet", [dialogue(seed) for seed in range(TRANSCRIPTS)], [SCHEMA]
    )
    return TranscriptDataset(path, made, options()), of_verl(path, made)


def test_verl_makes_the_same_ids_but_for_the_line_break_after_the_last_turn(made, both):
    ours, theirs = both
    (line_break,) = made.encode("\n", add_special_tokens=False)
    assert len(ours) == len(theirs) == TRANSCRIPTS
    for index in range(TRANSCRIPTS):
        # no model writes anything after the end of its last turn
        assert [*ours[index]["input_ids"].tolist(), line_break] == theirs[index]["input_ids"].tolist()


def test_verl_also_trains_on_the_line_breaks_that_no_model_samples(made, both):
    ours, theirs = both
    for index in range(TRANSCRIPTS):
        ids, mask = ours[index]["input_ids"], ours[index]["loss_mask"]
        ends = (ids == made.eos_token_id) & (mask == 1)
        after = torch.cat([torch.zeros(1, dtype=torch.bool), ends])  # the token after each end of an answer
        expected = torch.cat([mask, torch.zeros(1, dtype=mask.dtype)])
        assert not expected[after].any()  # a rollout's mask is 0 there
        expected[after] = 1
        assert torch.equal(theirs[index]["loss_mask"], expected)
        assert made.decode(theirs[index]["input_ids"][after]) == "\n" * int(after.sum())


def test_verl_renders_arguments_that_are_json_text_as_a_quoted_string_and_we_as_the_loop_reads_them(made, tmp_path):
    messages = dialogue(3)
    text = write_parquet(tmp_path / "text.parquet", [with_text_arguments(messages)], [SCHEMA])
    mapping = write_parquet(tmp_path / "mapping.parquet", [messages], [SCHEMA])
    ours = TranscriptDataset(text, made, options())
    assert ours.rows == TranscriptDataset(mapping, made, options()).rows
    theirs = made.decode(of_verl(text, made)[0]["input_ids"])
    assert '"arguments": "{' in theirs and '"arguments": "{' not in made.decode(ours[0]["input_ids"])


def test_verl_refuses_two_results_in_one_turn_that_the_template_joins(made, tmp_path):
    messages = [
        {"role": "user", "content": "both"},
        {"role": "assistant", "content": "", "tool_calls": [call_of("1"), call_of("2")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]
    path = write_parquet(tmp_path / "two.parquet", [messages], [SCHEMA])
    with pytest.raises(AssertionError, match="apply_chat_template to each turn separately"):
        of_verl(path, made)[0]
    whole = made.apply_chat_template(messages, tools=[SCHEMA], return_dict=False)
    ours = TranscriptDataset(path, made, options())[0]["input_ids"].tolist()
    assert ours == whole[: len(ours)] and made.decode(whole[len(ours) :]) == "\n"


def test_an_item_has_what_verls_trainer_reads(both):
    item = both[0][0]
    assert set(item) == set(both[1][0]) == {"input_ids", "position_ids", "loss_mask"}
    assert item["position_ids"].tolist() == list(range(len(item["input_ids"])))
    assert item["loss_mask"][0] == 0


def test_longer_transcripts_are_dropped_cut_or_refused_as_the_user_says(made, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [dialogue(seed) for seed in range(8)], [SCHEMA])
    whole = TranscriptDataset(path, made, options())
    lengths = sorted(len(row.ids) for row in whole.rows)
    limit = lengths[3]
    dropped = TranscriptDataset(path, made, options(max_length=limit))
    assert [len(row.ids) for row in dropped.rows] == [n for n in map(len, (r.ids for r in whole.rows)) if n <= limit]
    assert dropped.counts["too long"] == 8 - len(dropped) and f"{8 - len(dropped)} too long" in dropped.summary()
    right = TranscriptDataset(path, made, options(max_length=limit, truncation="right"))
    left = TranscriptDataset(path, made, options(max_length=limit, truncation="left"))
    for row, beginning, end in zip(whole.rows, right.rows, left.rows, strict=True):
        assert beginning.ids == row.ids[:limit] and beginning.mask == row.mask[:limit]
        assert end.ids == row.ids[-limit:] and end.mask[1:] == row.mask[-limit:][1:]
    assert right.counts["truncated"] == sum(n > limit for n in lengths)
    with pytest.raises(UserError, match=r"a.parquet: row \d+: \d+ tokens, more than data.max_length"):
        TranscriptDataset(path, made, options(max_length=limit, truncation="error"))


@pytest.mark.parametrize("place", ["tool", "answer", "call"])
def test_a_text_that_no_tokens_could_hold_is_dropped_without_being_encoded(made, tmp_path, monkeypatch, place):
    from recipe.dag.train.sft import data as sft_data

    endless, messages = "x" * 300_000, dialogue(0)
    if place == "call":
        next(m for m in messages if m.get("tool_calls"))["tool_calls"] = [call_of(endless)]
    else:
        wanted = "tool" if place == "tool" else "assistant"
        next(m for m in messages if m["role"] == wanted)["content"] = endless
    path = write_parquet(tmp_path / "a.parquet", [messages, dialogue(0)], [SCHEMA])
    encoded = []

    class Encoder(sft_data.TranscriptEncoder):
        def encode(self, messages, tools=None):
            encoded.append(messages)
            return super().encode(messages, tools)

    monkeypatch.setattr(sft_data, "TranscriptEncoder", Encoder)
    limit = max(len(row.ids) for row in TranscriptDataset(path, made, options(truncation="right")).rows[1:])
    encoded.clear()
    kept = TranscriptDataset(path, made, options(max_length=limit))
    assert len(encoded) == 1 and kept.counts == {"too long": 1, "used": 1}


def test_a_transcript_that_is_cut_inside_an_answer_does_not_train_its_first_token(made, tmp_path):
    from recipe.dag.policy.engine import sampled_positions

    path = write_parquet(tmp_path / "a.parquet", [dialogue(seed) for seed in range(4)], [SCHEMA])
    limit = 10  # within the last answer
    whole = TranscriptDataset(path, made, options())
    assert all(row.mask[-limit] == 1 for row in whole.rows)
    cut = TranscriptDataset(path, made, options(max_length=limit, truncation="left"))
    assert [item["loss_mask"].tolist() for item in cut] == [[0] + [1] * (limit - 1)] * 4
    jagged = [torch.nested.as_nested_tensor([item[key] for item in cut], layout=torch.jagged) for key in KEYS]
    assert sampled_positions(*jagged).tolist() == [row * limit + at for row in range(4) for at in range(limit - 1)]


def test_what_has_nothing_to_learn_is_counted(made, tmp_path):
    silent = [{"role": "user", "content": "x"}]
    path = write_parquet(tmp_path / "a.parquet", [silent, dialogue(0)], [SCHEMA])
    assert TranscriptDataset(path, made, options()).counts == {"used": 1, "without an assistant's message": 1}
    cut = options(max_length=40, truncation="right")  # within the prompt
    with pytest.raises(UserError, match="nothing to train on .*1 without an answer after truncation"):
        TranscriptDataset(path, made, cut)


def test_a_template_that_cannot_render_a_tools_result_is_one_line_with_the_row(tmp_path):
    start = "{{- '<|im_start|>'"
    refusing = tokenizer(LLAMA.replace(start, "{%- if m.role == 'tool' -%}{{ m.missing.x }}{%- endif -%}" + start))
    path = write_parquet(tmp_path / "a.parquet", [dialogue(0)], [SCHEMA])
    with pytest.raises(UserError, match="a.parquet: row 0: the chat template cannot render") as caught:
        TranscriptDataset(path, refusing, options())
    assert "\n" not in str(caught.value)


def test_files_that_are_not_transcripts_are_named(made, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and nothing else")
    other, empty = tmp_path / "other.parquet", tmp_path / "empty.parquet"
    parquet.write_table(pa.table({"prompt": ["x"]}), other)
    parquet.write_table(pa.table({"messages": pa.array([], pa.list_(pa.struct({"role": pa.string()})))}), empty)
    cases = {
        tmp_path / "missing.parquet": "no such file",
        torn: "not a readable parquet file",
        other: r"no column `messages` \(its columns: prompt\); set data.messages_key",
        empty: "nothing to train on",
    }
    for path, problem in cases.items():
        with pytest.raises(UserError, match=problem) as caught:
            TranscriptDataset(str(path), made, options())
        assert path.name in str(caught.value)


def test_a_file_without_tools_shows_none(made, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [dialogue(0)])
    assert "<tools>" not in made.decode(TranscriptDataset(path, made, options())[0]["input_ids"])


def test_an_epoch_takes_every_row_at_most_once_and_depends_on_seed_and_epoch_alone():
    batches = epoch_batches(10, 3, seed=0, epoch=1)
    rows = [row for batch in batches for row in batch]
    assert [len(batch) for batch in batches] == [3, 3, 3] and len(set(rows)) == 9
    assert [len(epoch_batches(n, 3, seed=0, epoch=1)) for n in (2, 3, 8, 9)] == [0, 1, 2, 3]
    assert batches == epoch_batches(10, 3, seed=0, epoch=1)
    assert batches != epoch_batches(10, 3, seed=0, epoch=2) and batches != epoch_batches(10, 3, seed=1, epoch=1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_processes_share_a_batch_evenly(ranks):
    batch, lengths = [7, 3, 9, 1, 4], [50, 10, 40, 30, 20]
    shares = [share(batch, lengths, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(part) for part in shares}) == 1
    assert collections.Counter(row for part in shares for row in part if row != PAD) == collections.Counter(batch)


def test_a_padding_row_trains_nothing(both):
    short = padding_of(tensors_of(both[0].rows[0]))
    assert len(short["input_ids"]) == 2 and not short["loss_mask"].any()
