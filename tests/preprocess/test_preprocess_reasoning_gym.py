"""Problems of reasoning-gym are scored by their verifier in a process of its own; verifiers that pay for nothing are
refused."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.dag.reward.entry_json import from_json, to_json
from recipe.dag.reward.verifier import scored, verifier_reward
from recipe.dag.train import data_script
from recipe.dag.train.data import load_samples
from recipe.dag.types.record import Call, Episode

pytest.importorskip("reasoning_gym")
script = pytest.importorskip("verl_dag.preprocess.reasoning_gym")

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.fractions()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.integers()), inner, max_size=3
        )
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_an_entry_is_stored_with_its_types(value):
    assert repr_sorted(from_json(to_json(value))) == repr_sorted(value)


def repr_sorted(value) -> str:
    if isinstance(value, set):
        return f"set{sorted(value)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{repr_sorted(k)}: {repr_sorted(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(repr_sorted, value))})"
    return repr(value)


def test_a_type_that_cannot_be_stored_is_refused():
    with pytest.raises(TypeError, match="a object cannot be stored"):
        to_json({"x": (1, object())})
    assert from_json(to_json(Fraction(1, 3))) == Fraction(1, 3)


@pytest.mark.parametrize("generator", ["complex_arithmetic", "game_of_life_halting"])
def test_a_verifier_that_pays_for_nothing_is_refused_by_name(generator, tmp_path, capsys):
    options = ["--generator", generator, "--local_dir", str(tmp_path / "out"), "--train_size", "4", "--test_size", "4"]
    assert data_script.run(script.main, options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{generator}: its verifier gives 1.00 of 1" in error
    assert not (tmp_path / "out").exists()


def test_an_episode_is_paid_by_the_verifier(tmp_path):
    options = ["--generator", "chain_sum", "--train_size", "30", "--test_size", "4", "max_terms=3", "min_terms=3"]
    for name in ("a", "b"):
        script.main([*options, "--local_dir", str(tmp_path / name)])
    files = [[(tmp_path / name / f"{part}.parquet").read_bytes() for part in ("train", "test")] for name in "ab"]
    assert files[0] == files[1]
    rows = {part: pq.read_table(tmp_path / f"a/{part}.parquet").to_pylist() for part in ("train", "test")}
    assert not {str(row["prompt"]) for row in rows["train"]} & {str(row["prompt"]) for row in rows["test"]}
    sample = load_samples(str(tmp_path / "a/test.parquet"))[0]
    truth = sample["ground_truth"]

    async def paid(text: str, **options) -> tuple[float, float | None]:
        call = Call("solve", "solver", 0, "main", 0, text=text, stop_reason="stop")
        episode = Episode("u", 0, sample, calls=[call])
        return (await verifier_reward(episode, **options))["solver"], episode.outcome

    async def play():
        for text in (f"So <answer>{truth}</answer>", f"So \\boxed{{{truth}}}"):
            assert await paid(text) == (1.0, 1.0), text
        for text in (f"It is {truth}", "<answer>nan</answer>", "<answer>().__class__</answer>"):
            assert await paid(text) == (0.0, 0.0), text
        partial, outcome = await paid(f"<answer>maybe {truth}</answer>", partial_credit=True)
        assert 0 < partial < 1 and outcome == 0
        problem = sample["extra_info"]["reasoning_gym"]
        assert await scored(problem, "x" * 10_000_000) == 0.0
        with pytest.raises(UserError, match="no extra_info.reasoning_gym"):
            await verifier_reward(Episode("u", 0, {"prompt": []}, calls=[Call("solve", "solver", 0, "main", 0)]))

    asyncio.run(play())


def test_bad_arguments_are_one_line(capsys):
    known = ["--generator", "chain_sum", "--local_dir", "x"]
    for options, message in [
        (["--generator", "chain_sums"], "--generator chain_sums: unknown"),
        (["--generator", "chain_sum"], "--generator and --local_dir are needed"),
        ([*known, "max_term=3"], "chain_sum has no option max_term; it has min_"),
        ([*known, "three"], "options of the generator are key=value"),
        ([*known, "seed=3"], "has no option seed"),
        ([*known, "max_terms=0"], "chain_sum: cannot generate"),
    ]:
        assert data_script.run(script.main, options) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error


def test_generators_and_their_options_are_listed(capsys):
    script.main(["--list"])
    assert len(names := capsys.readouterr().out.split()) >= 100 and "chain_sum" in names and "composite" not in names
    script.main(["--generator", "chain_sum", "--list"])
    assert "max_terms = " in capsys.readouterr().out
