from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from recipe.dag.app import cli
from recipe.dag.report.journal import Journal
from recipe.dag.types.record import Call, Episode
from tests.workflow.shapes import QWEN, write_config

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / "workflows"
SHARED = str(WORKFLOWS / "workflow_retool_ma.yaml")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs verl-dag; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["verl-dag", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def bad(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("dag_id: x\nagents: []\npolices: {}\n")
    return str(path)


def test_validate_prints_ok_for_every_good_file(run):
    files = sorted(map(str, WORKFLOWS.glob("*.yaml")))
    code, out, err = run("validate", *files)
    assert (code, err) == (0, "")
    assert [line.partition(": OK")[0] for line in out.splitlines()] == files


def test_validate_goes_on_after_a_bad_file_and_fails(run, bad):
    code, out, err = run("validate", bad, SHARED, "nowhere.yaml")
    assert code == 2
    assert out == f"{SHARED}: OK (3 agents, 1 policy, 3 rollout nodes)\n"
    lines = err.splitlines()
    assert f"{bad}:3:1: polices: unknown key; did you mean `policies`?" in lines[-2]
    assert lines[-1] == "nowhere.yaml: no such file"
    assert all(line.startswith(f"{bad}:") for line in lines[:-1])


@pytest.mark.parametrize("option", [("--data", "rows.jsonl"), ("--show",)])
def test_an_option_of_play_without_it_is_refused(run, option):
    code, out, err = run("validate", SHARED, *option)
    assert (code, out, err) == (2, "", f"{option[0]} has no effect without --play; add --play or remove it\n")


def test_play_shows_its_episodes_and_warns_of_keys_that_nothing_sets(run, tmp_path):
    path = tmp_path / "workflow.yaml"
    loop = "loops: {again: {nodes: [plan], max_rounds: 2, until: {node: plan, key: verdict, equals: 1}}}"
    path.write_text(f"{Path(SHARED).read_text()}{loop}\n".replace("recipe/", f"{ROOT}/recipe/"))
    code, out, err = run("validate", "--play", "--show", str(path))
    assert code == 0 and "episode 2: not solved" in out and "\\boxed{0}" in out
    assert f"{path}: warning: loops.again.until: reads `verdict` of plan, which no played episode has" in err


def test_another_checkout_than_the_one_in_this_folder_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run("algorithms")[2] == ""
    (tmp_path / "recipe" / "dag").mkdir(parents=True)
    (tmp_path / "recipe" / "dag" / "cli.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run("algorithms")[2].startswith(f"warning: this runs {ROOT}, not the checkout here")


def test_help_has_a_short_form_and_groups(run):
    code, out, _ = run("-h")
    assert code == 0 and out.index("Write and check") < out.index("Train and evaluate") < out.index("Read results")
    assert run("plan", "-h")[0] == 0


def test_plan_shows_text_by_default(run):
    code, out, err = run("plan", SHARED)
    assert (code, err) == (0, "") and "retool_ma (workflow_retool_ma.yaml)" in out


def test_plan_in_other_formats(run):
    assert run("plan", SHARED, "--format", "mermaid")[1].startswith("flowchart TD\n")
    assert json.loads(run("plan", SHARED, "--format", "json")[1])["dag_id"] == "retool_ma"


def test_plan_says_whether_a_run_fits_its_gpus(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", write_config(tmp_path / "m", QWEN["3b"]))
    code, out, err = run("plan", SHARED, "--gpu_gb", "80")
    assert (code, err) == (0, "")
    assert "GPUs of each machine: 1 of 80.0 GB" in out and "micro-batches: 16,384 tokens; offload: none" in out
    assert out.splitlines()[-1] == "  fits: 73.2 of 80.0 GB"
    last = run("plan", SHARED, "--gpu_gb", "24")[1].splitlines()[-1]
    assert (
        last.startswith("  does not fit: optimizer step of main needs 65.2 GB of each GPU's 24.0") and "; pass " in last
    )
    code, out, err = run("plan", SHARED, "+profile=gpu_32gb")
    assert "each GPU" not in err and "  fits: " in out.splitlines()[-1] and "of 32.0 GB" in out
    gpus = json.loads(run("plan", SHARED, "trainer.n_gpus_per_node=4", "--gpu_gb", "80", "--format", "json")[1])
    assert gpus["gpus"][0]["gpus"] == 4 and gpus["gpus"][0]["problem"] is None


def test_plan_says_why_there_is_no_estimate(run, monkeypatch):
    monkeypatch.setattr("recipe.dag.workflow.machine._gpus", lambda environ: ())
    monkeypatch.delenv("MODEL_PATH", raising=False)
    last = "Memory of each GPU: not estimated, {}"
    assert run("plan", SHARED)[1].splitlines()[-1] == last.format(
        "the memory of the GPUs is unknown; pass --gpu_gb 80 (scripts: GPU_GB=80)"
    )
    shown = run("plan", SHARED, "--gpu_gb", "80")[1].splitlines()[-1]
    assert shown == last.format("environment variable MODEL_PATH is not set")
    tiny = ("--config-path", str(ROOT / "recipe/retool_ma/config"), "--config-name", "tiny_cpu")
    assert run("plan", SHARED, *tiny)[1].splitlines()[-1] == "Memory of each GPU: none is used (platform=cpu)"
    assert run("plan", SHARED, "trainer.n_gpus=2")[0] == 2
    monkeypatch.setattr("recipe.dag.settings.compose.has_verl", lambda: False)
    code, out, _ = run("plan", SHARED)
    assert code == 0 and "since verl, whose configuration a run has, is not installed" in out.splitlines()[-1]


def test_plan_of_a_missing_or_bad_file_is_lines_and_exit_code_2(run, bad):
    assert run("plan", "nowhere.yaml") == (2, "", "nowhere.yaml: no such file\n")
    code, out, err = run("plan", bad)
    assert (code, out) == (2, "") and err.count("\n") >= 2 and "Traceback" not in err


def test_plan_checks_what_validate_checks_and_ends_with_the_same_code(run, tmp_path):
    path = tmp_path / "workflow.yaml"
    path.write_text(Path(SHARED).read_text().replace("\n  main:\n", "\n  main:\n    config: {rollout.dtipe: x}\n", 1))
    validated, planned = run("validate", str(path)), run("plan", str(path))
    assert validated == planned == (2, "", validated[2])
    assert validated[2].count("\n") == 1 and "did you mean `rollout.dtype`?" in validated[2]


def test_the_version_names_verls_too(run):
    code, out, err = run("--version")
    assert (code, err) == (0, "") and re.fullmatch(r"verl-dag \d+\.\d+\.\d+ \(verl 0\.9\.1\)\n", out)


def test_a_wrong_format_is_a_usage_error(run):
    code, out, err = run("plan", SHARED, "--format", "dot")
    assert code == 2 and "dot" in err


SIIRL = ROOT / "tests" / "compat" / "siirl" / "marft.yaml"


def test_warnings_go_to_stderr_and_fail_nothing(run):
    for command in ("validate", "plan"):
        code, out, err = run(command, str(SIIRL))
        assert code == 0 and out.strip()
        assert f"{SIIRL}:4:1: warning: actor_1_config: unknown key" in err
        assert all(": warning: " in line for line in err.splitlines())


def test_import_prints_or_writes_a_file_that_loads(run, tmp_path):
    code, out, err = run("import", str(SIIRL))
    assert (code, err) == (0, "") and out.startswith("# Made from marft.yaml")
    new = str(tmp_path / "new.yaml")
    assert run("import", str(SIIRL), "-o", new) == (0, f"{new}: written\n", "")
    assert run("validate", new) == (0, f"{new}: OK (2 agents, 2 policies, 2 rollout nodes)\n", "")
    code, out, err = run("import", str(SIIRL), "-o", new)
    assert (code, out) == (2, "") and "already exists; delete it" in err
    code, out, err = run("import", str(SIIRL), "-o", str(tmp_path / "no" / "new.yaml"))
    assert code == 2 and "cannot be written" in err and "Traceback" not in err


def test_import_of_a_broken_file_writes_nothing(run, bad, tmp_path):
    code, out, err = run("import", bad, "-o", str(tmp_path / "new.yaml"))
    assert (code, out) == (2, "") and "did you mean `policies`?" in err and not (tmp_path / "new.yaml").exists()


def test_serve_takes_a_model_or_a_script(run):
    either = (2, "", "serve: pass either MODEL or --script FILE.py:FUNCTION\n")
    assert run("serve") == run("serve", "model", "--script", "a.py:b") == either
    told = run("serve", "--script", "a.py:b", "--max-len", "5")
    assert told == (2, "", "--max-len has no effect with --script; remove it\n")


def test_trace_prints_an_episode(run, tmp_path):
    call = Call("solve", "solver", 0, "main", 0, text="7 boxes")
    Journal(tmp_path).episodes(3, [Episode("u", 0, {"prompt": "How many?"}, calls=[call], outcome=1.0)])
    code, out, _ = run("trace", str(tmp_path), "--solved")
    assert code == 0 and "step 3, train, sample u" in out and "7 boxes" in out
    assert run("trace", str(tmp_path), "--unsolved")[0] == 2
    assert run("trace", str(tmp_path), "--svg", str(tmp_path / "trace.svg"))[0] == 0
    assert (tmp_path / "trace.svg").is_file()
    code, out, _ = run("trace", str(tmp_path), "--list", "--agent", "solver")
    assert code == 0 and " u/0 " in out
    page = tmp_path / "page" / "trace.html"
    code, out, _ = run("trace", str(tmp_path), "-o", str(page))
    assert code == 0 and out.startswith(f"{page}: 1 episode, ") and page.read_bytes().startswith(b"<!doctype html>")
    assert run("trace", *[str(tmp_path)] * 2, "-o", str(page))[1].startswith(f"{page}: 2 episodes")
    several = "several runs are for a page; add --output FILE.html\n"
    assert run("trace", *[str(tmp_path)] * 2) == (2, "", several)
    for command in (("trace", "-o", str(page)), ("watch",)):
        assert run(*command, *[str(tmp_path)] * 5) == (2, "", "5 runs: a page compares at most four\n")
