import json
from pathlib import Path

import pytest

from examples import compare_estimators as compare
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.compose import compose_config


@pytest.fixture(autouse=True)
def model_path(monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "somewhere")


@pytest.mark.parametrize("name", compare.ALGORITHMS)
def test_every_estimator_gives_a_workflow_that_loads(name, tmp_path):
    path = tmp_path / f"{name}.yaml"
    path.write_text(compare.yaml.safe_dump(compare.workflow_with(name), sort_keys=False))
    workflow = load_workflow(path)
    assert workflow.algorithm.estimator == compare.ALGORITHMS[name]["estimator"]
    assert (workflow.policies["main"].critic is not None) == (name == "gae_chain")
    assert ("team" in {node.id for node in workflow.nodes}) == (name != "gae_chain")


def metrics(path, accuracies, validations, tokens):
    lines = [{"step": 0, "val/accuracy": validations[0]}]
    for step, accuracy in enumerate(accuracies, 1):
        line = {"step": step, "episode/accuracy": accuracy, "tokens/sampled": tokens}
        lines.append(line | ({"val/accuracy": validations[step]} if step in validations else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_accuracy_stands_at_the_tokens_it_was_trained_with(tmp_path):
    found = compare.curves(metrics(tmp_path / "m.jsonl", [0.1, 0.2, 0.3], {0: 0.05, 2: 0.25}, 10.0))
    assert found[compare.ACCURACY] == [(0.0, 0.1), (10.0, 0.2), (20.0, 0.3)]  # rolled out before the step's update
    assert found[compare.VALIDATION] == [(0.0, 0.05), (20.0, 0.25)]
    assert found[compare.SAMPLED][-1] == (30.0, 3)


@pytest.mark.parametrize(("tokens", "value"), [(0.0, 0.1), (9.9, 0.1), (10.0, 0.2), (99.0, 0.2)])
def test_at_reads_the_last_measurement_within_the_budget(tokens, value):
    assert compare.at([(0.0, 0.1), (10.0, 0.2)], tokens) == value


def test_the_run_with_the_fewest_tokens_sets_the_budget(tmp_path):
    short = metrics(tmp_path / "short.jsonl", [0.1, 0.5], {0: 0.1, 2: 0.5}, 10.0)
    long = metrics(tmp_path / "long.jsonl", [0.1, 0.9], {0: 0.1, 1: 0.4, 2: 0.9}, 15.0)
    table = compare.report({"short": [compare.curves(short)], "long": [compare.curves(long)]}, tmp_path)
    assert "(of 20)" in table
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[4:]}
    assert rows["short"].startswith("| short | 0.100 | 0.100 | 0.500 | 0.500 |")
    assert rows["long"].startswith("| long | 0.100 | 0.100 | 0.400 | 0.400 |")  # its 30 tokens are beyond the 20
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "table.md").read_text() == table


def test_the_figure_has_the_tables_names_and_a_dot_per_validation_that_all_seeds_have_within_the_budget(tmp_path):
    validations = ({0: 0.1, 2: 0.5, 3: 0.6}, {0: 0.3, 2: 0.7, 3: 0.8})
    seeds = [metrics(tmp_path / f"{i}.jsonl", [0.2, 0.4, 0.6], validations[i], 10.0 + i) for i in range(2)]
    runs = [compare.curves(file) for file in seeds]
    figure = compare.draw({"grpo_pooled": runs, "grpo": runs}, 30.0)
    training, unseen = figure.axes
    assert [text.get_text() for text in unseen.get_legend().get_texts()] == ["grpo_pooled", "grpo"]
    (line, _), (raw, _) = unseen.lines, training.lines
    assert (line.get_marker(), raw.get_marker()) == ("o", "")
    assert list(line.get_xdata()) == [0.0, 21.0] and list(line.get_ydata()) == pytest.approx([0.2, 0.6])
    assert list(raw.get_xdata()) == [0.0, 10.5, 21.0]  # in training, seed 1's 33 tokens would be beyond the 30
    lower, upper = unseen.collections[0].get_datalim(unseen.transData).intervaly
    assert (lower, upper) == pytest.approx((0.1, 0.7))
    assert figure.get_suptitle().endswith("mean of 2 seeds, bands from their minimum to their maximum")
    assert compare.draw({"grpo": runs[:1]}, 30.0).get_suptitle().endswith("one seed")


def test_every_run_is_started_as_its_configuration_has_it(tmp_path, monkeypatch, capsys):
    started = []

    def run(arguments, log):
        if arguments[1] != "recipe.dag.main":
            return
        name, folder, overrides = arguments[5], Path(arguments[3]), arguments[6:]
        config = compose_config(name, overrides, folder)
        started.append(
            (Path(config.workflow).stem, config.seed, config.model_path, config.trainer.total_training_steps)
        )
        assert config.data.train_files == str(tmp_path / f"seed{config.seed}" / "data" / "train.parquet")
        assert config.data.val_files == str(tmp_path / f"seed{config.seed}" / "data" / "test.parquet")
        assert config.trainer.save_freq == 7
        metrics(Path(config.output_dir) / "metrics.jsonl", [0.1, 0.5], {0: 0.1, 2: 0.5}, 10.0)

    monkeypatch.setattr(compare, "run", run)
    given = ["--seeds", "0", "4", "--steps", "2", "--output", str(tmp_path), "--", "trainer.save_freq=7"]
    compare.main(given)
    models = {seed: str(tmp_path / f"seed{seed}" / "model") for seed in (0, 4)}
    assert started == [(name, seed, models[seed], 2) for seed in (0, 4) for name in compare.ALGORITHMS]
    assert capsys.readouterr().out.count("0.500") >= len(compare.ALGORITHMS)


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(SystemExit, match="boom"):
        compare.run(["-c", "raise ValueError('boom')"], tmp_path / "log")
