"""What a workflow overrides, against what verl's configuration has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipe.dag.app.launch import launch
from recipe.dag.app.preflight import check_overrides
from recipe.dag.core.problem import WorkflowError
from recipe.dag.settings.compose import compose_config

TEXT = """\
dag_id: demo
agents: [{name: a, policy: p}]
policies: {p: {model: {path: m}, config: CONFIG, critic: {config: CRITIC}}}
algorithm: {estimator: gae}
nodes:
  - {id: a, agent: a}
  - {id: r, reward: "json:dumps", after: a}
"""


@pytest.fixture(scope="module")
def composed():
    return compose_config("dag", ["workflow=w.yaml"])


@pytest.fixture
def write(tmp_path):
    def write(config: str = "{}", critic: str = "{}"):
        path = tmp_path / "workflow.yaml"
        path.write_text(TEXT.replace("CONFIG", config).replace("CRITIC", critic))
        return path

    return write


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{rollout.gpu_memory_utilisation: 0.3}",
         "nothing reads it here; did you mean `rollout.gpu_memory_utilization`?"),
        ("{critic.optim.lr: 1}", "nothing reads it here; remove it (docs/migrating.md"),
        ("{actor.optim: 3}", "verl's `actor_rollout_ref.actor.optim` is a mapping; write"),
        ("{actor.strategy.name: 3}", "nothing reads it here"),
        ("{model.fused_kernel_options.name: 3}", "verl's `actor_rollout_ref.model.fused_kernel_options` has no `name`"),
        ('{rollout.enforce_eager: "False"}', "expected true or false, got 'False'"),
        ('{rollout.gpu_memory_utilization: "0.3"}', "expected a number, got '0.3'"),
        ("{rollout.tensor_model_parallel_size: true}", "expected a number, got true"),
    ],
)  # fmt: skip
def test_what_verl_does_not_know_is_told_at_its_place(config, message, write, composed):
    with pytest.raises(WorkflowError) as caught:
        check_overrides(write(config), composed)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (3, 43) and problem.where.startswith("policies.p.config")
    assert problem.message.startswith(message)


def test_a_critics_overrides_are_those_of_verls_critic(write, composed):
    message = r"policies.p.critic.config\[\"optim.num_cycle\"\]: nothing reads it here; did you mean `optim.num_cycles`"
    with pytest.raises(WorkflowError, match=message):
        check_overrides(write(critic="{optim.num_cycle: 3}"), composed)
    check_overrides(write(critic="{optim.weight_decay: 0.1, ppo_micro_batch_size_per_gpu: 4}"), composed)


@pytest.mark.parametrize(
    "config",
    [
        "{rollout.max_num_seqs: 3, actor.optim.weight_decay: 0, actor.fsdp_config.param_offload: true}",
        "{model.override_config.attn_implementation: sdpa, rollout: {engine_kwargs: {sglang: {any: {thing: 1}}}}}",
        "{model.mtp.enable: true, ref.log_prob_max_token_len_per_gpu: 9000, rollout.max_model_len: null}",
    ],
)
def test_what_verl_has_or_leaves_open_passes(config, write, composed):
    check_overrides(write(config), composed)


def test_a_run_ends_there_before_anything_is_started(write):
    files = [f"workflow={write('{rollout.dtipe: x}')}", "data.train_files=train.parquet"]
    with pytest.raises(WorkflowError, match="did you mean `rollout.dtype`"):
        launch("dag", files)


def test_validate_tells_it_without_importing_verl(write):
    command = "import sys; from recipe.dag import cli; sys.argv = ['verl-dag', 'validate', sys.argv[1]]\n"
    command += "try: cli.main()\nfinally: assert 'verl' not in sys.modules and 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", command, str(write("{rollout.dtipe: x}"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "workflow.yaml:3:43: policies.p.config" in done.stderr and "did you mean `rollout.dtype`?" in done.stderr
