"""Everything that is shipped to be used as it is: workflows, configurations, run scripts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.dag.app.preflight import check_run
from recipe.dag.app.study import plans, read_study
from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.compose import CONFIG_FOLDER, compose_config
from recipe.dag.train.sft.compose import compose_sft
from recipe.dag.workflow import render
from recipe.dag.workflow.plan import make_plan

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted([*ROOT.glob("workflows/*.yaml"), *ROOT.glob("examples/**/workflow*.yaml")])
SFT_CONFIGS = sorted(ROOT.glob("recipe/*/config/sft*.yaml"))
CONFIGS = sorted({*ROOT.glob("recipe/*/config/*.yaml"), *ROOT.glob("examples/*/config/*.yaml")} - set(SFT_CONFIGS))
PROFILES = sorted(CONFIG_FOLDER.glob("profile/*.yaml"))
SCRIPTS = sorted(
    [*ROOT.glob("recipe/**/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"]
)
STUDIES = sorted([*ROOT.glob("examples/studies/*.yaml"), *ROOT.glob("examples/games/studies/*.yaml")])
REQUIRED = ["workflow=w.yaml", "data.train_files=train.parquet"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("file", WORKFLOWS, ids=relative)
def test_workflow_is_valid_and_can_be_shown(file):
    workflow = load_workflow(file)
    plan = make_plan(workflow)
    assert workflow.dag_id in render.to_text(plan)
    arrows = re.findall(r"n\d+ (?:-->|-\.->)(?:\|\"[^\"]+\"\|)? n\d+", render.to_mermaid(plan))
    assert len(arrows) == len(set(arrows)) == sum(len(node.after) for node in workflow.nodes)
    assert json.loads(render.to_json(plan))["dag_id"] == workflow.dag_id


@pytest.mark.parametrize("file", sorted(ROOT.glob("workflows/*.yaml")), ids=relative)
def test_a_copy_of_a_workflow_loads_in_any_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = load_workflow(shutil.copy(file, tmp_path))
    assert copy.model_copy(update={"path": str(file)}) == load_workflow(file)


def test_workflow_names_are_distinct():
    names = [load_workflow(file).dag_id for file in WORKFLOWS]
    assert len(set(names)) == len(names) >= 5


@pytest.mark.parametrize("file", CONFIGS, ids=relative)
def test_configuration_composes_and_resolves_and_asks_for_a_workflow(file):
    config = compose_config(file.stem, REQUIRED, file.parent)
    OmegaConf.to_container(config.data, resolve=True)
    OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
    assert config.workflow == "w.yaml" and config.output_dir
    assert config.trainer.n_gpus_per_node in (None, 1) or file.stem in ("full", "two_gpus"), (
        "null: all that are visible; ReTool-MA's own keys say 1"
    )
    with pytest.raises(UserError, match="no value for workflow; pass it as workflow="):
        compose_config(file.stem, [], file.parent)


@pytest.mark.parametrize("file", SFT_CONFIGS, ids=relative)
def test_configuration_of_fine_tuning_composes_and_resolves(file):
    required = ["data.train_files=d.parquet", "model.path=m", "output_dir=o"]
    config = compose_sft(required, name=file.stem, folder=file.parent)
    OmegaConf.to_container(config, resolve=True)
    assert config.trainer.default_local_dir == "o/checkpoints" and config.policy == "main"


@pytest.mark.parametrize("profile", PROFILES, ids=relative)
@pytest.mark.parametrize("base", [f for f in CONFIGS if f.stem in ("dag", "qwen2_5_3b")], ids=relative)
def test_profile_overrules_the_configuration_and_the_command_line_overrules_it(profile, base):
    overrides = [*REQUIRED, f"+profile={profile.stem}"]
    content = OmegaConf.load(profile)
    config = compose_config(base.stem, overrides, base.parent)
    assert config.data.max_prompt_length == content.data.max_prompt_length
    assert config.actor_rollout_ref.actor.fsdp_config.offload_policy
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    config = compose_config(base.stem, [*overrides, "data.max_prompt_length=77"], base.parent)
    assert config.data.max_prompt_length == 77


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_script_parses(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


RECIPES = [
    script
    for script in SCRIPTS
    if script.parent.name
    in ("retool", "retool_ma", "mathchat", "marft", "debate", "cory", "gsm8k", "games", "dsbench", "kuhn", "spin")
]


@pytest.mark.parametrize("script", RECIPES, ids=relative)
def test_run_script_names_files_that_exist(script):
    words = re.sub(r'["{}=)]|:-', " ", script.read_text()).split()
    named = [
        w.partition(":")[0].rstrip(".,;")
        for w in words
        if w.startswith(("recipe/", "preprocess/", "workflows/", "examples/"))
    ]
    named = [word for word in named if "$" not in word]
    assert named and [word for word in named if not (ROOT / word).exists()] == []


GPU_SCRIPT = ROOT / "recipe" / "retool_ma" / "run_qwen2_5-3b.sh"
MARFT_SCRIPT = ROOT / "recipe" / "marft" / "run_qwen2_5-3b_marft.sh"


@pytest.mark.parametrize("script", [GPU_SCRIPT, MARFT_SCRIPT, *ROOT.glob("recipe/*/run_smollm2.sh")], ids=relative)
def test_gpu_script_without_a_gpu_points_to_the_tiny_run(script, gpu_script):
    gpu_script.expect_refusal(script, "no NVIDIA GPU", MODEL_PATH="model")


@pytest.mark.parametrize("script", [GPU_SCRIPT, MARFT_SCRIPT], ids=relative)
def test_gpu_script_without_a_model_points_to_the_tiny_run(script, gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    gpu_script.expect_refusal(script, "set MODEL_PATH")


@pytest.mark.parametrize("script", [GPU_SCRIPT, MARFT_SCRIPT, *ROOT.glob("recipe/*/run_smollm2.sh")], ids=relative)
def test_a_key_of_wandb_turns_it_on(script, gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    keys = {"MODEL_PATH": "model", "PYTHON": "/bin/echo", "WANDB_API_KEY": "k"}
    done = gpu_script.run(script, "data.train_files=mine.jsonl", **keys)
    assert done.returncode == 0, done.stderr
    assert any("trainer.logger=[console,tensorboard,wandb]" in line.split() for line in done.stdout.splitlines())


def test_gpu_script_without_data_says_how_to_make_it(gpu_script, tmp_path):
    gpu_script.pretend_there_is_a_gpu()
    missing = {"MODEL_PATH": "model", "DATA_DIR": str(tmp_path / "none"), "PYTHON": "/bin/echo"}
    done = gpu_script.run(GPU_SCRIPT, **missing)
    command = f"python preprocess/competition.py --local_dir {tmp_path / 'none'}"
    assert done.returncode == 2 and done.stderr.endswith(f"does not exist; make it: {command}\n")
    given = gpu_script.run(GPU_SCRIPT, "data.train_files=mine.jsonl", **missing)
    assert given.returncode == 0 and given.stdout.endswith("data.train_files=mine.jsonl\n")


SMALL_SCRIPT = ROOT / "recipe" / "retool_ma" / "run_smollm2.sh"


def test_the_small_models_script_takes_a_seed_before_overrides(gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    done = gpu_script.run(SMALL_SCRIPT, "2", "trainer.total_training_steps=3", PYTHON="/bin/echo")
    assert done.returncode == 0, done.stderr
    check, *made, data, run = (line.split() for line in done.stdout.splitlines())
    assert "--check" in check and made in ([], [["examples/small_model.py", "outputs/smollm2"]]), "made once"
    assert data[:3] == ["recipe/tiny/arithmetic.py", "--local_dir", "outputs/retool_ma_smollm2_seed2/data"]
    assert run[-1] == "trainer.total_training_steps=3" and "seed=2" in run
    assert "trainer.experiment_name=retool_ma_smollm2_seed2" in run
    assert "workflow=workflows/workflow_retool_ma_small.yaml" in run


AGENTS = ("planner", "executor", "verifier")


@pytest.mark.parametrize("weights", ["separate", "adapters"])
def test_agents_of_the_small_model_have_weights_of_their_own(weights, gpu_script, tmp_path):
    gpu_script.pretend_there_is_a_gpu()
    (python := tmp_path / "show").write_text(
        f'#!{shutil.which("bash")}\n[[ "$*" != *--check* ]] || printf "%s\\n" "$@"\n'
    )
    python.chmod(0o755)
    arguments = gpu_script.run(SMALL_SCRIPT, PYTHON=str(python), WEIGHTS=weights).stdout.splitlines()
    settings = arguments[arguments.index("smollm2") + 1 :]
    flow = check_run("smollm2", settings, ROOT / "recipe" / "retool_ma" / "config").workflow
    assert {agent.name: agent.policy for agent in flow.agents} == {name: name for name in AGENTS}
    assert [flow.policies[name].lora is not None for name in AGENTS] == [weights == "adapters"] * 3


def test_each_model_of_the_small_team_has_its_cold_start(gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    done = gpu_script.run(ROOT / "recipe" / "gsm8k" / "run_smollm2.sh", "1", PYTHON="/bin/echo")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("examples/")]
    solver, checker, run = lines[-3:]
    sft = "-m recipe.dag.cli sft outputs/gsm8k_smollm2_seed1/data/sft.parquet --model".split()
    assert solver[:6] == [*sft, "outputs/smollm2"] and checker[:6] == [*sft, "outputs/gemma3"]
    assert {"outputs/gsm8k_smollm2_seed1/sft/solver"} < {*solver} and "seed=1" in run
    assert "output_dir=outputs/gsm8k_smollm2_seed1" in run


RETOOL_SCRIPT = ROOT / "recipe" / "retool" / "run_smollm2.sh"


def test_retools_gpu_script_trains_twice_and_evaluates_each_model(gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    done = gpu_script.run(RETOOL_SCRIPT, "2", "trainer.total_training_steps=3", PYTHON="/bin/echo")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("examples/")]
    check, data, transcripts, sft, grpo, *evaluations, table = (line.split() for line in lines)
    assert "--check" in check
    out = "outputs/retool_smollm2_seed2"
    assert data[:3] == ["recipe/tiny/arithmetic.py", "--local_dir", f"{out}/data"]
    assert transcripts[:2] == ["-m", "recipe.retool.teacher"] and transcripts[-1] == "2"
    assert sft[2:6] == ["sft", f"{out}/data/sft.parquet", "--model", "outputs/smollm2_tools"] and sft[-1] == "seed=2"
    assert grpo[-1] == "trainer.total_training_steps=3" and f"model_path={out}/sft/huggingface" in grpo
    models = [" ".join(words[-2:]) for words in evaluations]
    assert models == [
        "--model outputs/smollm2_tools",
        f"--model {out}/sft/huggingface",
        f"--checkpoint {out}/checkpoints",
    ]
    assert table == ["-m", "recipe.retool.table", out]


@pytest.fixture
def started(tmp_path):
    """Runs bash with a Python that only writes down what it is asked: one (MODEL_PATH, arguments) per process, but for
    the check of settings (tests/scripts/test_scripts_arguments.py)."""
    python, log = tmp_path / "venv" / "bin" / "python", tmp_path / "asked"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/bash\n(printf '%s\\t' "${{MODEL_PATH:-}}" "$@"; echo) >> {log}\n""")
    python.chmod(0o755)

    def run(*arguments: str, **env: str) -> list[tuple[str, list[str]]]:
        env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "VERL_DAG_VENV": str(tmp_path / "venv"), **env}
        log.unlink(missing_ok=True)
        done = subprocess.run(["bash", *arguments], env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = log.read_text().splitlines() if log.exists() else []
        calls = ((model, words[:-1]) for model, *words in (line.split("\t") for line in lines))
        return [call for call in calls if "--check" not in call[1]]

    return run


@pytest.mark.parametrize(("extra", "asked"), [(None, "[cpu]"), ("dev", "[cpu,dev]")])
def test_overrides_of_a_run_are_no_packages(extra, asked, started):
    """A sourced file sees the arguments of the script that sources it."""
    script = f"set -eu; . {ROOT}/recipe/dag/scripts/cpu_env.sh"
    overrides = ("run", "trainer.total_training_steps=3")
    calls = started("-c", script, *overrides, **({"VERL_DAG_EXTRA": extra} if extra else {}))
    assert calls[-1][1][-1] == f"{ROOT}{asked}"
    assert not any("trainer" in word for _, words in calls for word in words)


@pytest.mark.parametrize(
    "recipe", ["retool_ma", "retool_ma_revise", "retool_ma_transcript", "marft", "debate", "cory", "spin"]
)
@pytest.mark.parametrize(
    ("arguments", "env", "seed", "overrides"),
    [
        ((), {}, "0", []),
        (("2", "a=1"), {}, "2", ["a=1"]),
        (("a=1", "b=2"), {"SEED": "3", "WANDB_API_KEY": "k"}, "3", ["a=1", "b=2"]),
        (("007", "a=1"), {"SEED": "3"}, "007", ["a=1"]),
    ],
)
def test_a_tiny_run_takes_a_seed_before_overrides(recipe, arguments, env, seed, overrides, started):
    base, variant = re.fullmatch("(.*?)(_revise|_transcript)?", recipe).groups("")
    script = ROOT / "recipe" / base / f"run_tiny{variant}_cpu.sh"
    data, model, (path, train) = [call for call in started(script, *arguments, **env) if "pip" not in call[1]]
    name = f"{recipe}_tiny" + (f"_seed{seed}" if seed != "0" else "")
    assert data[1][:3] == ["recipe/tiny/arithmetic.py", "--local_dir", f"outputs/{name}/data"]
    assert all(words[words.index("--seed") + 1] == seed for _, words in (data, model))
    assert model[1][model[1].index("--output") + 1] == path == f"outputs/{name}/model"
    assert f"seed={seed}" in train and f"trainer.experiment_name={name}" in train
    assert ("trainer.logger=[console,tensorboard,wandb]" in train) == ("WANDB_API_KEY" in env)
    assert train[len(train) - len(overrides) :] == overrides and "--config-path" in train
    named = [
        word.partition("=")[2] or word.partition(":")[0] for _, words in (data, model, ("", train)) for word in words
    ]
    named = [word for word in named if word.startswith(("recipe/", "preprocess/", "workflows/"))]
    assert len(named) == 5 and all((ROOT / word).exists() for word in named)
    assert not variant or [w for w in named if "workflows" in w] == [f"workflows/workflow_{recipe}.yaml"] * 2


def test_a_tiny_run_has_adapters_or_says_that_it_has_none(started):
    calls = started(ROOT / "recipe" / "marft" / "run_tiny_cpu.sh", "1", "a=1", WEIGHTS="adapters")
    train = calls[-1][1]
    assert "trainer.experiment_name=marft_tiny_lora_seed1" in train and train[-1] == "a=1"
    assert sum(word.endswith(".lora.base=base") for word in train) == 2
    for recipe in ("debate", "dsbench"):
        script, env = ROOT / "recipe" / recipe / "run_tiny_cpu.sh", {"WEIGHTS": "adapters"}
        with pytest.raises(AssertionError, match="this script does not read it"):
            started(script, **env)


@pytest.mark.parametrize("baseline", ["no_tool", "single_agent"])
def test_a_tiny_run_of_a_baseline_has_its_own_teacher_and_folder(baseline, started):
    script = ROOT / "recipe" / "retool_ma" / f"run_tiny_{baseline}_cpu.sh"
    _, model, (path, train) = [call for call in started(script, "1", "a=1") if "pip" not in call[1]]
    workflow = f"workflows/workflow_{baseline}{'_tool' * (baseline == 'single_agent')}.yaml"
    assert path == f"outputs/retool_ma_{baseline}_tiny_seed1/model" and train[-1] == "a=1"
    assert workflow in model[1] and f"workflow={workflow}" in train and (ROOT / workflow).exists()
    last = len(model[1]) - 1 - model[1][::-1].index("--teacher")
    assert model[1][last + 1] == "recipe/retool_ma/baseline_teacher.py:Teacher", "the last one counts"


@pytest.mark.parametrize(
    ("arm", "workflow", "settings"),
    [
        ("plain", "kuhn", []),
        ("entropy_0.1", "kuhn", ["workflow.algorithm.entropy_coef=0.1"]),
        ("past", "kuhn_past", []),
    ],
)
def test_the_arms_of_kuhn_poker_have_runs_and_workflows_of_their_own(arm, workflow, settings, started):
    script = ROOT / "recipe" / "kuhn" / "run_tiny_cpu.sh"
    calls = started(script, "1", "a=1", ARM=arm)
    data, model, (path, train) = [call for call in calls if "pip" not in call[1]]
    assert data[1][0] == "recipe/kuhn/deals.py" and path == f"outputs/kuhn_{arm}_seed1/model"
    assert path == model[1][model[1].index("--output") + 1] and "seed=1" in train
    assert f"workflow=workflows/workflow_{workflow}.yaml" in train
    assert f"trainer.experiment_name=kuhn_{arm}_seed1" in train
    assert train[-1 - len(settings) :] == [*settings, "a=1"]
    wrong = subprocess.run(
        ["bash", script], env={"PATH": "/usr/bin:/bin", "ARM": "plan"}, capture_output=True, text=True
    )
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: ARM=plan: it must be plain, entropy_0.1 (or another number) or past\n",
    )


def test_the_games_run_takes_names_and_beginnings_of_names(started):
    script = ROOT / "examples" / "games" / "run_tiny_cpu.sh"
    calls = [words for _, words in started(script, "climbing", "a=1", "relay_4", SEED="1") if "pip" not in words]
    trained = [words for words in calls if "recipe.dag.main" in words]
    names = [word.partition("=")[2] for words in trained for word in words if "experiment_name" in word]
    plays = ("climbing_simultaneous", "climbing_sequential", "climbing_fast_follower", "relay_4")
    assert names == [f"games_{play}_seed1" for play in plays] and {words[-1] for words in trained} == {"a=1"}
    files = [word.partition("=")[2] for words in trained for word in words if word.startswith("workflow=")]
    assert (
        all((ROOT / file).is_file() for file in files[:3]) and files[3] == "outputs/games_relay_4_seed1/workflow.yaml"
    )
    assert ["examples/games/sized.py", "relay_4", "--output", files[3]] in calls
    wrong = subprocess.run(["bash", script, "chess"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "") and "chess: unknown game; choose from anti" in wrong.stderr
    asked = subprocess.run(["bash", script, "--help"], capture_output=True, text=True)
    assert (asked.returncode, asked.stderr) == (0, "") and "run_tiny_cpu.sh [GAME ...]" in asked.stdout


@pytest.mark.parametrize("file", STUDIES, ids=relative)
def test_every_arm_of_a_study_starts_a_run_that_passes_all_checks(file, started, tmp_path, monkeypatch):
    monkeypatch.setenv("COACH_URL", "http://localhost:1/v1")
    monkeypatch.setenv("COACH_MODEL", "judge")
    study = read_study(file)
    for plan in plans(study, file, tmp_path):
        if plan.seed != study.seeds[-1] or plan.program[0] != "bash":
            assert Path(plan.program[1]).is_file()
            continue
        env = {"SEED": str(plan.seed), "COACH_URL": "http://localhost:1/v1"}
        calls = started(*plan.program[1:], *plan.settings, **env)
        model, words = next(call for call in calls if "recipe.dag.main" in call[1])
        assert [words for _, words in calls if "recipe.tiny.build" in words and str(plan.seed) in words]
        monkeypatch.setenv("MODEL_PATH", model)
        _, _, _, folder, _, name, *settings = words
        for words in (words for _, words in calls if "examples/games/sized.py" in words):
            sized = tmp_path / "workflow.yaml"
            subprocess.run([sys.executable, *words[:-1], str(sized)], cwd=ROOT, check=True)
            settings.append(f"workflow={sized}")
        checked = check_run(name, settings, Path(folder))
        assert checked.config.output_dir == str(plan.folder) and checked.config.seed == plan.seed
        assert checked.config.trainer.total_training_tokens == study.tokens


def test_the_fast_tests_exist():
    lists = re.findall(r"fast\+?=\((.+)\)", (ROOT / "tests" / "run.sh").read_text())
    words = subprocess.run(["bash", "-c", f"echo {' '.join(lists)}"], capture_output=True, text=True, check=True)
    paths = words.stdout.split()
    assert len(paths) > 15 and not [path for path in paths if not (ROOT / path).exists()]
