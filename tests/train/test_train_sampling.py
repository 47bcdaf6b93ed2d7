"""Which samples a run trains on: whole epochs, equal shares of strata, subsets, and prompts shared with validation."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.app.launch import launch
from recipe.dag.core.errors import UserError
from recipe.dag.train.sampling import (
    Sampler,
    StratifiedSampler,
    choose_subset,
    conflicting_labels,
    describe,
    sampler_of,
    shared_prompts,
)
from tests.train.projects import Started, launched, overrides_of, reported, save


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**32), st.integers(1, 6))
def test_each_epoch_is_a_permutation(size, batch_size, seed, steps):
    picks = [pick for step in range(1, steps + 1) for pick in Sampler(size, batch_size, seed).batch(step)]
    assert [epoch for _, epoch in picks] == [position // size for position in range(steps * batch_size)]
    whole = steps * batch_size // size
    for epoch in range(whole):
        assert sorted(index for index, e in picks if e == epoch) == list(range(size))
    last = Counter(index for index, e in picks if e == whole)
    assert all(count == 1 for count in last.values())


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000), st.integers(1, 50))
def test_a_steps_samples_depend_on_seed_and_step_alone(size, batch_size, seed, step):
    used = Sampler(size, batch_size, seed)
    for earlier in range(1, 4):
        used.batch(earlier)
    assert used.batch(step) == Sampler(size, batch_size, seed).batch(step)


def test_seeds_and_epochs_differ_in_order():
    first, second = Sampler(100, 200, 0).batch(1), Sampler(100, 200, 1).batch(1)
    assert first != second
    assert [i for i, e in first if e == 0] != [i for i, e in first if e == 1]


def test_nothing_to_sample_is_refused():
    with pytest.raises(UserError, match="train_batch_size=0"):
        Sampler(10, 0, 0)
    with pytest.raises(UserError, match="no sample"):
        Sampler(0, 1, 0)


strata = st.lists(st.sampled_from("aaabbc"), min_size=2, max_size=40).filter(lambda names: len(set(names)) > 1)


@given(strata, st.integers(3, 20), st.integers(0, 1000), st.integers(1, 8))
def test_every_step_has_each_stratums_share(names, batch_size, seed, steps):
    sampler = StratifiedSampler(names, batch_size, seed)
    sizes = Counter(names)
    largest = max(sorted(sizes), key=lambda name: sizes[name])
    for step in range(1, steps + 1):
        picked = Counter(names[index] for index, _ in sampler.batch(step))
        assert picked.total() == batch_size
        for name, size in sizes.items():
            share = max(1, round(batch_size * size / len(names)))
            assert picked[name] == (
                share if name != largest else batch_size - sum(picked[n] for n in sizes if n != name)
            )


@given(strata, st.integers(3, 20), st.integers(0, 1000))
def test_each_stratums_epochs_are_permutations_and_wrap(names, batch_size, seed):
    sampler = StratifiedSampler(names, batch_size, seed)
    picks = [pick for step in range(1, 9) for pick in sampler.batch(step)]
    assert len(set(picks)) == len(picks), "a sample is picked once per epoch"
    for name in set(names):
        own = [(index, epoch) for index, epoch in picks if names[index] == name]
        epochs = Counter(epoch for _, epoch in own)
        members = [index for index, stratum in enumerate(names) if stratum == name]
        for epoch in range(max(epochs)):  # all but the last are complete
            assert sorted(index for index, e in own if e == epoch) == members


@given(strata, st.integers(3, 20), st.integers(0, 1000), st.integers(1, 50))
def test_a_stratified_step_depends_on_seed_and_step_alone(names, batch_size, seed, step):
    used = StratifiedSampler(names, batch_size, seed)
    for earlier in range(1, 4):
        used.batch(earlier)
    assert used.batch(step) == StratifiedSampler(names, batch_size, seed).batch(step)


def test_strata_are_mixed_within_a_step():
    names = ["a"] * 50 + ["b"] * 50
    firsts = {names[StratifiedSampler(names, 16, 0).batch(step)[0][0]] for step in range(1, 20)}
    assert firsts == {"a", "b"}


def test_strata_need_room_in_a_step():
    with pytest.raises(UserError, match="data.stratify_key: 4 strata do not fit into data.train_batch_size=3"):
        StratifiedSampler(["a", "b", "c", "d"], 3, 0)


def samples(*types):
    extra = [{} if name is None else {"data_type": name} for name in types]
    return [{"prompt": [{"role": "user", "content": str(i)}], "extra_info": e} for i, e in enumerate(extra)]


def test_fewer_than_two_known_strata_are_sampled_plainly():
    for types in (("a", "a", "a"), ("a", None, "")):
        sampler = sampler_of(samples(*types), 2, 0, "extra_info.data_type")
        assert isinstance(sampler, Sampler) and describe(sampler) == ""
        assert sampler.batch(1) == Sampler(3, 2, 0).batch(1)


def test_samples_without_the_key_are_a_stratum():
    sampler = sampler_of(samples("a", "b", None, "b"), 4, 0, "extra_info.data_type")
    assert isinstance(sampler, StratifiedSampler) and sampler.counts == {"a": 1, "b": 2, "unknown": 1}
    assert describe(sampler) == "samples of each step: 1 a, 2 b, 1 unknown"


def test_a_key_that_no_sample_has_is_refused():
    with pytest.raises(UserError, match="data.stratify_key=extra_info.kind: no sample has it"):
        sampler_of(samples("a", "b"), 2, 0, "extra_info.kind")


def test_a_subset_is_the_published_one():
    np.random.seed(42)
    expected = sorted(np.random.choice(933, 512, replace=False).tolist())
    assert choose_subset(933, 512, 42) == expected
    assert len(set(expected)) == 512


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 100))
def test_a_subset_has_distinct_ascending_indices(total, size, seed):
    chosen = choose_subset(total, size, seed)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(total, size)
    assert set(chosen) <= set(range(total)) and chosen == choose_subset(total, size, seed)


def test_prompts_are_compared_without_spacing_and_case():
    def asked(*texts):
        return [{"prompt": [{"role": "user", "content": text}]} for text in texts]

    assert shared_prompts(asked("2 + 2?", "3 + 3?"), asked("4?", "2+2 ?", "3 + 3?")) == [1, 2]
    assert shared_prompts(asked("2 + 2?"), asked("2 + 2?")) == [0]
    assert shared_prompts(asked("Play!", "Play!"), asked("Play!")) == []
    assert shared_prompts([], asked("2 + 2?")) == []


def test_rows_that_repeat_a_prompt_with_another_ground_truth_are_named(project, capsys):
    rows = [("1 1 + 2", "13"), ("11 + 2", "13"), ("9", "9"), ("9", "9 "), ("9", "8"), ("11 + 2", "4")]
    content = json.dumps([{"problem": problem, "answer": answer} for problem, answer in rows])
    for name in ("train", "val"):
        (project / f"{name}.json").write_text(content)
        launched(project, "trainer.resume_mode=disable", "data.val_overlap=allow")
        line = (
            f"warning: data.{name}_files: 2 of 6 rows repeat a prompt with another ground truth, such as '9' with '9'"
        )
        report = reported(capsys)
        assert f"{line} and '8'; correct or remove them: row 5 (as 3), 6 (as 2)\n" in report
        assert report.count("another ground truth") == (1 if name == "train" else 2)
    same = [
        {"prompt": [{"role": "user", "content": "Play!"}], "ground_truth": str(n), "extra_info": {}} for n in range(3)
    ]
    assert conflicting_labels(same) == []


def test_a_run_records_its_subset_and_resumes_only_with_it(project, monkeypatch):
    from recipe.dag.policy import cluster
    from recipe.dag.train.resources import Resources

    class NoTools:
        policies: dict = {}

        def check_agents(self, workflow, models): ...

        async def ready(self): ...

        async def start_policies(self, *arguments, **options):
            raise Started

        async def close(self): ...

    async def opened(*arguments, **options):
        return NoTools()

    monkeypatch.setattr(Resources, "open", opened)
    monkeypatch.setattr(cluster.Cluster, "join", lambda self: None)
    monkeypatch.setattr(cluster.Cluster, "nodes", lambda self: [])
    monkeypatch.setattr(cluster.Cluster, "start", lambda self: None)
    launched(project, "data.subset.size=2", "trainer.resume_mode=disable")
    record = json.loads((project / "out" / "subset.json").read_text())
    assert record["random_indices"] == choose_subset(4, 2, 42)
    assert (record["total_available"], record["sampled_size"], record["seed"]) == (4, 2, 42)
    assert record["original_dataset"] == [f"{project}/train.json"]
    save(project)
    with pytest.raises(UserError, match="data.subset.seed: was absent, now 42\n  data.subset.size: was absent, now 2"):
        launch("dag", overrides_of(project, "data.subset.size=2"))
    launched(project, "trainer.resume_mode=disable")
    assert not (project / "out" / "subset.json").exists()


def test_a_stratified_run_does_not_resume_a_plain_one(project):
    save(project)
    with pytest.raises(UserError, match="data.stratify_key: was absent, now ground_truth"):
        launch("dag", overrides_of(project, "data.stratify_key=ground_truth"))


def test_shared_prompts_are_a_warning_an_error_or_allowed(project, capsys):
    (project / "val.json").write_text(
        json.dumps([{"problem": "0 + 1", "answer": "1"}, {"problem": "9", "answer": "9"}])
    )
    disable = "trainer.resume_mode=disable"
    launched(project, disable)
    assert "warning: data.val_files: 1 of 2 prompts are also training prompts, the first: '0 + 1'" in reported(capsys)
    with pytest.raises(UserError, match="remove them from one of the files"):
        launch("dag", overrides_of(project, disable, "data.val_overlap=refuse"))
    launched(project, disable, "data.val_overlap=allow")
    assert "training prompts" not in reported(capsys)
