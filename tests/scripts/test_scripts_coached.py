"""run_train_{mathchat,dsbench}.sh: MODEL, a KEY that never becomes a setting, and settings after `--`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipe.dag.loading.edits import load_edited, split_edits
from recipe.dag.settings.compose import compose_config
from tests.scripts.training_script import ROOT, TrainingScript
from tests.workflow.shapes import QWEN, write_config

AGENTS = {"mathchat": ("solver", "coder", "verifier"), "dsbench": ("engineer", "modeler", "analyst")}
DEFAULT_COACH = {"mathchat": "gemini-2.5-flash", "dsbench": "gemini-2.5-pro"}
MAKES_DATA = {
    "mathchat": "python preprocess/competition.py",
    "dsbench": "python recipe/dsbench/prepare.py --input TASKS.json",
}


class Coached(TrainingScript):
    """A recipe's script, with a `python` that prints the coach's environment, too."""

    def __init__(self, recipe: str, folder):
        self.recipe, self.folder = recipe, ROOT / "recipe" / recipe
        shown = '"COACH_API_KEY=${COACH_API_KEY:-}" "COACH_URL=${COACH_URL:-}"'
        super().__init__(self.folder / f"run_train_{recipe}.sh", folder, more=f"printf 'env %s\\n' {shown} >&2")

    def run(self, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        return super().run(*arguments, **{"DATA_DIR": str(self.data), **options})

    def settings(self, *arguments: object, config: str = "full", **env: str) -> list[str]:
        done = self.run(self.model, *arguments, **({} if config == "full" else {"CONFIG": config}), **env)
        assert done.returncode == 0, done.stderr
        assert not [part for part in ("Secret", "g-1") if part in done.stdout]
        self.printed = done.stderr
        words = done.stdout.splitlines()
        assert words[:3] == ["-m", "recipe.dag.main", "--config-path"]
        assert words[3:6] == [f"recipe/{self.recipe}/config", "--config-name", config]
        return words[6:]

    def workflow(self, *arguments: object, **options):
        self.rest, edits = split_edits(self.settings(*arguments, **options))
        assert all("=" in setting for setting in self.rest)
        (path,) = (setting.removeprefix("workflow=") for setting in self.rest if setting.startswith("workflow="))
        return load_edited(ROOT / path, edits)

    def coach(self, *arguments: object, **options):
        """Return the API of the coach, and the name of its provider."""
        workflow = self.workflow(*arguments, **options)
        assert workflow.policies["coach"].frozen and workflow.agents[3].on_failure == "skip"
        api = workflow.policies["coach"].api
        return api, api.service.name if api.service is not None else None


@pytest.fixture(params=AGENTS)
def script(request, tmp_path) -> Coached:
    return Coached(request.param, tmp_path)


@pytest.fixture
def mathchat(tmp_path) -> Coached:
    return Coached("mathchat", tmp_path)


@pytest.fixture
def dsbench(tmp_path) -> Coached:
    return Coached("dsbench", tmp_path)


def test_without_a_key_the_coach_is_a_frozen_copy(script):
    workflow = script.workflow("--", "trainer.total_training_steps=3")
    assert script.rest[-1] == "trainer.total_training_steps=3"
    assert workflow.policies["coach"].api is None and workflow.policies["coach"].frozen
    assert workflow.trained_policies() == AGENTS[script.recipe]
    config = compose_config("full", script.rest, script.folder / "config")
    assert config.model_path == str(script.model) and config.data.val_files == f"{script.data}/test.parquet"
    assert script.recipe == "mathchat" or config.data.stratify_key == "extra_info.data_type"


def test_a_key_goes_into_the_environment_alone(script):
    api, service = script.coach("sk-Secret.123")
    assert (api.key_env, api.model, service) == ("COACH_API_KEY", DEFAULT_COACH[script.recipe], "google")
    assert api.base_url is None and "COACH_API_KEY=sk-Secret.123" in script.printed


def test_the_name_of_a_variable_stands_for_its_key(script):
    api, service = script.coach("MY_KEY", MY_KEY="g-1", COACH_MODEL="gpt-4o-mini")
    assert (api.key_env, api.model, service) == ("MY_KEY", "gpt-4o-mini", "openai")
    assert "g-1" not in script.printed
    refused = script.run(script.model, "MY_KEY")
    assert refused.returncode == 2 and "is not set" in refused.stderr


def test_a_server_without_a_key(script):
    api, _ = script.coach(COACH_URL="http://127.0.0.1:9/v1", COACH_MODEL="mine")
    assert (api.key_env, api.model, api.base_url) == (None, "mine", "${oc.env:COACH_URL}")
    assert "COACH_URL=http://127.0.0.1:9/v1" in script.printed


def test_google_credentials_in_place_of_a_key_and_a_logger(script):
    api, _ = script.coach(COACH_PROVIDER="vertex", WANDB_API_KEY="w")
    assert (api.provider, api.key_env, api.model) == ("vertex", None, DEFAULT_COACH[script.recipe])
    assert "trainer.logger=[console,tensorboard,wandb]" in script.rest


def test_shared_weights_are_one_setting(script):
    workflow, first = script.workflow(WEIGHTS="shared"), AGENTS[script.recipe][0]
    assert workflow.trained_policies() == (first,) and list(workflow.policies) == [first, "coach"]


def test_adapters_are_on_one_frozen_model_which_the_coach_is_unless_it_has_another(script):
    trained = AGENTS[script.recipe]
    workflow = script.workflow(WEIGHTS="adapters")
    assert workflow.trained_on("base") == trained == workflow.trained_policies() and len(workflow.policies) == 4
    assert workflow.agents[3].policy == "base" and {workflow.policies[name].lr for name in trained} == {1e-5}
    assert script.workflow(WEIGHTS="adapters", COACH_MODEL_PATH="m").agents[3].policy == "coach"
    assert script.workflow("sk-Secret.1", WEIGHTS="adapters").policies["coach"].api is not None


def test_data_files_of_the_callers_own(script):
    missing = f"test.parquet does not exist; make it: {MAKES_DATA[script.recipe]}"
    script.expect_refusal(missing, script.model, "--", "data.train_files=mine.jsonl", DATA_DIR=f"{script.data}/none")
    mine = ("data.train_files=mine.jsonl", "data.val_files=[a, b]")
    assert script.settings("--", *mine, DATA_DIR="/none")[-2:] == list(mine)


@pytest.mark.parametrize(
    ("arguments", "env", "reason"),
    [
        ((), {}, "MODEL is missing"),
        (("MODEL",), {}, "placeholder"),
        (("<model>",), {}, "placeholder"),
        (("data.train_batch_size=1",), {}, "settings follow --"),
        (("{model}", ""), {}, "KEY is empty"),
        (("{model}", "trainer.nnodes=1"), {}, "settings follow --"),
        (("{model}", "--config", "small"), {}, "3 arguments before --, at most 2 are taken"),
        (("{model}", "my key"), {}, "KEY is a placeholder or an option"),
        (("{model}", "--help"), {}, "KEY is a placeholder or an option"),
        (("{model}", "--", "word"), {}, "'word' is not key=value"),
        (("{data}",), {}, "has no config.json"),
        (("{model}",), {"WEIGHTS": "tied"}, "separate, shared or adapters"),
        (("{model}",), {"CONFIG": "large"}, "has no large.yaml"),
        (("{model}",), {"COACH_MODEL": "a, key_env: HOME"}, "no model's name has"),
        (("{model}",), {"COACH_PROVIDER": "google"}, "must be vertex"),
        (("{model}",), {"COACH_PROVIDER": "vertex", "COACH_URL": "http://h/v1"}, "neither KEY nor COACH_URL"),
        (("{model}",), {"gpu": False}, "no NVIDIA GPU"),
    ],
)
def test_bad_arguments_are_one_line(script, arguments, env, reason):
    names = {"{model}": script.model, "{data}": script.data}
    message = script.expect_refusal(reason, *(names.get(argument, argument) for argument in arguments), **env)
    assert ("run_tiny_cpu.sh" in message) == ("gpu" in env)


def test_no_message_repeats_the_key(script):
    for arguments in (("sk-Secret", "a", "b"), (script.model, "sk-Secret=1"), (script.model, "sk Secret")):
        done = script.run(*arguments)
        assert done.returncode == 2 and "Secret" not in done.stdout + done.stderr


def test_help_is_the_header(script):
    done = script.run("--help")
    title = "MathChat" if script.recipe == "mathchat" else "The data science team"
    assert done.returncode == 0 and done.stdout.startswith(f"{title} on CUDA GPUs") and "COACH_MODEL=" in done.stdout


@pytest.mark.parametrize(("profile", "most"), [("small", 1024), ("full", 4096), ("two_gpus", 4096)])
def test_actions_are_as_long_as_the_profile_has_room_for(mathchat, profile, most):
    workflow = mathchat.workflow(config=profile)
    assert [agent.sampling.max_tokens for agent in workflow.agents] == [most] * 3 + [1024]


def test_the_plan_without_training(script):
    done = script.run(script.model, "sk-Secret", SHOW="1", GPU_GB="80", gpu=False)
    words = done.stdout.splitlines()
    assert words[:4] == ["-m", "recipe.dag.cli", "plan", f"workflows/workflow_{script.recipe}.yaml"]
    assert "--gpu-gb" in words and "Secret" not in done.stdout
    assert not any(word.startswith("workflow=") for word in words)


def test_settings_of_the_coach_follow_its_key(script):
    own = [f"workflow.policies.coach.api.{key}" for key in ("budget={usd: 20}", "price={input: 0.3, output: 2.5}")]
    api, _ = script.coach("GEMINI_API_KEY", "--", *own, GEMINI_API_KEY="g-1")
    assert api.budget is not None and api.budget.usd == 20 and api.key_env == "GEMINI_API_KEY"


def test_the_folder_of_the_tables_reaches_the_env_and_the_reward(dsbench):
    workflow = dsbench.workflow(DATA_ROOT=str(dsbench.data))
    assert workflow.envs["folder"].kwargs["data_root"] == str(dsbench.data)
    assert workflow.node("task").args["data_root"] == str(dsbench.data)
    assert dsbench.workflow().envs["folder"].kwargs["data_root"] is None
    dsbench.expect_refusal("DATA_ROOT: /nowhere is not a folder", dsbench.model, DATA_ROOT="/nowhere")


@pytest.mark.parametrize(
    ("gpus", "profile", "layers", "width"), [(1, "small", 24, 896), (2, "small", 28, 1536), (8, "full", 36, 2560)]
)
def test_the_plan_says_that_the_profiles_fit(dsbench, zygote, gpus, profile, layers, width):
    """On GPUs of 80 GB, with models of about 0.5B, 1.5B and 4B parameters."""
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": width // 64, "num_key_value_heads": 2 if width < 2000 else 8}
    shape |= {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 65536}
    write_config(dsbench.model, QWEN["0.5b"] | shape)
    env = {"SHOW": "1", "GPU_GB": "80", "CONFIG": profile, "PYTHON": str(zygote.python), "PYTHONPATH": str(ROOT)}
    done = dsbench.run(dsbench.model, "--", f"trainer.n_gpus_per_node={gpus}", **env)
    assert done.returncode == 0, done.stderr
    assert "  fits: " in done.stdout and "does not fit" not in done.stdout


@pytest.mark.parametrize(
    ("settings", "env", "checked"),
    [((), {}, True), (("--", "sandbox.url=http://host:8080"), {}, False), ((), {"SHOW": "1", "GPU_GB": "80"}, False)],
)
def test_packages_that_the_programs_lack_end_the_script_before_anything_starts(
    dsbench, tmp_path, settings, env, checked
):
    """With this interpreter for the check alone, which the sandbox of a run has, too."""
    real = tmp_path / "real"
    real.write_text(
        f'#!/bin/bash\n[ "$1" = -c ] || {{ echo "$@"; exit; }}\n'
        f'exec {sys.executable} -c "from recipe.dag.app import doctor\n'
        "doctor.DATA_SCIENCE = ('json', 'lacking')\n$2\"\n"
    )
    real.chmod(0o755)
    done = dsbench.run(dsbench.model, *settings, PYTHON=str(real), PYTHONPATH=str(ROOT), **env)
    assert done.returncode == (2 if checked else 0), done.stderr
    assert ("error: the sandbox has no lacking, which" in done.stderr) == checked == (not done.stdout)
    assert len(done.stderr.splitlines()) == checked


def test_smollm2_learns_the_form_and_coaches_itself(gpu_script):
    smollm2 = ROOT / "recipe" / "mathchat" / "run_smollm2.sh"
    gpu_script.pretend_there_is_a_gpu()
    done = gpu_script.run(smollm2, "2", "trainer.total_training_steps=3", PYTHON="/bin/echo")
    assert done.returncode == 0, done.stderr
    check, *made, data, transcripts, sft, train = done.stdout.splitlines()
    out = "outputs/mathchat_smollm2_seed2"
    assert "--check" in check and made in ([], ["examples/small_model.py outputs/smollm2"]), "made once"
    assert f"--local_dir {out}/data" in data and f"--output {out}/data/sft.parquet" in transcripts
    assert f"sft {out}/data/sft.parquet --model outputs/smollm2 --output {out}/sft" in sft and "sft_smollm2" in sft
    assert f"model_path={out}/sft/huggingface" in train and train.endswith(" trainer.total_training_steps=3")
    assert all("seed 2" in line or "seed=2" in line for line in (data, transcripts, sft, train))
    assert "coach" not in train  # the workflow's own: a frozen copy of the model
