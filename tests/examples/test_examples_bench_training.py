"""The comparison of training engines, on the CPU."""

from __future__ import annotations

import json
import sys

import pytest

from examples import bench_training


@pytest.fixture
def forked(zygote, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(zygote.python))


def test_an_arm_measures_both_passes_and_is_reported(forked, tiny_model, tmp_path, capfd):
    small = ["--rows", "6", "--shortest", "10", "--longest", "40", "--passes", "2"]
    arms = ["no_recompute+logits@512", "adapters@512"]
    bench_training.main([str(tiny_model), "--arms", ",".join(arms), *small, "--out", str(tmp_path)])
    found, printed = json.loads((tmp_path / "training.json").read_text())["arms"], capfd.readouterr().out
    for arm in arms:
        assert found[arm]["log_prob_tokens_per_s"] > 0 and found[arm]["update_tokens_per_s"] > 0
        assert found[arm]["tokens"] == 512 and not {"peak_gb", "estimate_gb"} & set(found[arm])
        assert arm in printed


def test_an_arm_that_fails_is_named_with_its_log(forked, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        bench_training.main([str(tmp_path / "no_model"), "--arms", "logits", "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert f"logits: failed, see {tmp_path}/logits.log" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [(["--arms", "packed+mine@9"], "unknown arm mine"), (["--passes", "1"], "the first one is left out")],
)
def test_what_it_cannot_measure_is_one_line(words, line, capsys):
    with pytest.raises(SystemExit):
        bench_training.main(["model", *words])
    assert line in capsys.readouterr().err
