"""Hub data sets, by the real `datasets.load_dataset` from a folder laid out like one."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train.data import Columns, load_samples


def test_training_and_validation_take_their_own_splits_of_the_configuration(gsm8k):
    train = load_samples(str(gsm8k), columns=Columns(name="main"))
    test = load_samples(str(gsm8k), columns=Columns(name="main", split="test"))
    assert [len(train), len(test)] == [8, 4]
    assert all(sample["prompt"][0]["content"].startswith("main train") for sample in train)
    assert all(sample["prompt"][0]["content"].startswith("main test") for sample in test)
    assert test[2]["ground_truth"] == "1002" and test[2]["data_source"] == "gsm8k"
    assert [train[0]["extra_info"]["split"], test[0]["extra_info"]["split"]] == ["train", "test"]


def test_another_configuration_is_taken_by_name(gsm8k):
    samples = load_samples(str(gsm8k), columns=Columns(name="socratic", split="train[:1]"))
    assert [sample["prompt"][0]["content"].partition(":")[0] for sample in samples] == ["socratic train"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (Columns(), "split 'train' cannot be loaded .*'main', 'socratic'"),
        (Columns(name="main", split="dev"), "split 'dev' of configuration 'main' cannot be loaded .*'train', 'test'"),
        (Columns(name="mian"), "configuration 'mian' cannot be loaded .*'main', 'socratic'"),
    ],
)
def test_a_split_or_configuration_that_is_missing_is_one_line_that_names_the_keys(gsm8k, columns, reason):
    with pytest.raises(UserError, match=reason) as caught:
        load_samples(str(gsm8k), what="data.val_files", columns=columns)
    message = str(caught.value)
    assert message.startswith("data.val_files: ") and "\n" not in message
    assert message.endswith("see data.val_split and data.val_name")


@pytest.mark.parametrize(("name", "configuration"), [(None, "main"), ("socratic", "socratic")])
def test_gsm8k_on_the_hub_needs_no_name(monkeypatch, name, configuration):
    asked = []

    def load_dataset(path, name=None, *, split):
        asked.append((path, name, split))
        return SimpleNamespace(to_list=lambda: [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    samples = load_samples("openai/gsm8k", columns=Columns(name=name))
    assert asked == [("openai/gsm8k", configuration, "train")]
    assert samples[0]["ground_truth"] == "2"


def test_a_folder_without_data_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be loaded as a data set") as caught:
        load_samples(str(tmp_path))
    assert "\n" not in str(caught.value)
