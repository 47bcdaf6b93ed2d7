"""siiRL's flags, one by one: what each means here, or why it means nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from recipe.dag.errors import UserError
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.problem import WorkflowError
from recipe.marft.edits import edited
from recipe.marft.flags import FLAGS, translate
from recipe.marft.train import main, prepared

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "workflows" / "workflow_marft.yaml"
RUN = "actor_rollout_ref"


def agents(**sampling):
    return lambda flow: all(agent.sampling.model_dump().items() >= sampling.items() for agent in flow.agents)


def validation(**sampling):
    return lambda flow: all(agent.validation.model_dump().items() >= sampling.items() for agent in flow.agents)


def algorithm(**keys):
    return lambda flow: flow.algorithm.model_dump().items() >= keys.items()


def critics(**keys):
    return lambda flow: all(policy.critic.model_dump().items() >= keys.items() for policy in flow.policies.values())


def actors(**keys):
    return lambda flow: all(policy.model_dump().items() >= keys.items() for policy in flow.policies.values())


def episode(**keys):
    return lambda flow: flow.episode.model_dump().items() >= keys.items()


GPU = f"{RUN}.rollout"
ACTOR = f"{RUN}.actor"
IN_THE_WORKFLOW = [
    ("algorithm.adv_estimator=gae_marft", algorithm(estimator="gae_chain")),
    ("algorithm.gamma=0.99", algorithm(gamma=0.99)),
    ("algorithm.lam=0.95", algorithm(lam=0.95)),
    ("algorithm.share_reward_in_agent=False", algorithm(share_reward_in_agent=False)),
    ("algorithm.use_kl_in_reward=True", algorithm(kl_reward_coef=0.001)),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02", algorithm(kl_reward_coef=0.02)),
    ("algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.02", algorithm(kl_reward_coef=0.0)),
    (f"{GPU}.agent.rewards_with_env=True", lambda flow: flow.node("rollout_actor").agent_options.rewards_with_env),
    (f"{GPU}.multi_turn.max_assistant_turns=5", episode(max_turns=5)),
    (f"{GPU}.multi_turn.use_all_traj=True", episode(train_turns="all")),
    (f"{GPU}.multi_turn.use_all_traj=false", episode(train_turns="last")),
    (f"{GPU}.temperature=0.7", agents(temperature=0.7)),
    (f"{GPU}.top_p=0.9", agents(top_p=0.9)),
    (f"{GPU}.top_k=20", agents(top_k=20)),
    (f"{GPU}.val_kwargs.temperature=0.3", validation(temperature=0.3)),
    (f"{GPU}.val_kwargs.top_p=0.8", validation(top_p=0.8)),
    (f"{GPU}.val_kwargs.top_k=5", validation(top_k=5)),
    (f"{GPU}.val_kwargs.do_sample=False", validation(temperature=0.0)),
    (f"{GPU}.val_kwargs.do_sample=False {GPU}.val_kwargs.temperature=0.9", validation(temperature=0.0)),
    (f"{GPU}.response_length=512", agents(max_tokens=512)),
    ("data.max_response_length=512", agents(max_tokens=512)),
    (f"{ACTOR}.optim.lr=2e-6", actors(lr=2e-6)),
    (f"{ACTOR}.ppo_mini_batch_size=32 data.train_batch_size=128", algorithm(mini_batches=4)),
    (f"{ACTOR}.ppo_epochs=2", algorithm(epochs=2)),
    (f"{ACTOR}.clip_ratio=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.1)),
    (f"{ACTOR}.clip_ratio_low=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.2)),
    (f"{ACTOR}.clip_ratio_high=0.3 {ACTOR}.clip_ratio=0.1", algorithm(clip_ratio_low=0.1, clip_ratio_high=0.3)),
    (f"{ACTOR}.clip_ratio_high=0.3", algorithm(clip_ratio_low=0.2, clip_ratio_high=0.3)),
    (f"{ACTOR}.clip_ratio_c=5.0", algorithm(clip_ratio_c=5.0)),
    (f"{ACTOR}.entropy_coeff=0.001", algorithm(entropy_coef=0.001)),
    (f"{ACTOR}.use_kl_loss=False", algorithm(kl_loss_coef=0.0)),
    (f"{ACTOR}.use_kl_loss=False", actors(reference=False)),
    (f"{ACTOR}.use_kl_loss=True", actors(reference=True)),
    (f"{ACTOR}.kl_loss_coef=0.05", algorithm(kl_loss_coef=0.05)),
    (
        "critic.model.path=org/value",
        critics(model={"path": "org/value", "tokenizer_path": None, "trust_remote_code": False}),
    ),
    ("critic.optim.lr=3e-6", critics(lr=3e-6)),
    ("critic.cliprange_value=0.3", critics(cliprange_value=0.3)),
    ("critic.ppo_epochs=2", critics(epochs=2)),
    ("critic.ppo_mini_batch_size=64 data.train_batch_size=128", critics(mini_batches=2)),
    ("critic.use_dynamic_bsz=False", critics(config={"use_dynamic_bsz": False})),
    ("trainer.critic_warmup=3", algorithm(critic_warmup=3)),
]
IN_THE_RUN = [
    ("dag.workflow_path=w.yaml", {"workflow": "w.yaml"}),
    (f"{RUN}.model.path=org/model", {"model_path": "org/model"}),
    (f"{GPU}.val_kwargs.n=4", {"validation.n": "4"}),
    (f"{GPU}.prompt_length=99", {"data.max_prompt_length": "99"}),
    (f"{GPU}.response_length=99", {"data.max_response_length": "99"}),
    (f"{ACTOR}.grad_clip=0.5", {f"{ACTOR}.optim.clip_grad": "0.5"}),
    ("critic.grad_clip=0.5", {"critic.optim.clip_grad": "0.5"}),
    (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": "4", f"{ACTOR}.use_dynamic_bsz": "False"},
    ),
    ("critic.ppo_micro_batch_size_per_gpu=4", {"critic.ppo_micro_batch_size_per_gpu": "4"}),
    *[
        (f"{flag}={value}", {flag: value})
        for flag, value in {
            f"{RUN}.model.use_remove_padding": "True",
            f"{RUN}.model.enable_gradient_checkpointing": "True",
            f"{GPU}.n": "1",
            f"{GPU}.max_model_len": "12288",
            f"{GPU}.tensor_model_parallel_size": "2",
            f"{GPU}.gpu_memory_utilization": "0.3",
            f"{GPU}.enforce_eager": "False",
            f"{GPU}.enable_chunked_prefill": "False",
            f"{ACTOR}.use_dynamic_bsz": "True",
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            "data.train_files": "a.parquet",
            "data.val_files": "b.parquet",
            "data.train_batch_size": "128",
            "data.max_prompt_length": "10240",
            "trainer.val_before_train": "False",
            "trainer.save_freq": "30",
            "trainer.test_freq": "10",
            "trainer.logger": "[console]",
            "trainer.n_gpus_per_node": "8",
            "trainer.nnodes": "1",
        }.items()
    ],
]
AS_HERE = [
    "algorithm.kl_ctrl.type=fixed",
    "dag.enable_perf=False",
    f"{GPU}.name=sglang",
    f"{GPU}.mode=async",
    f"{GPU}.free_cache_engine=True",
    "data.return_raw_chat=True",
    "data.filter_overlong_prompts=False",
    "data.truncation=error",
    "data.shuffle=True",
]
REFUSED = [
    ("algorithm.adv_estimator=rloo", "choose one of gae_marft, gae, grpo, cpgd"),
    ("algorithm.kl_ctrl.type=adaptive", "the weight of the KL"),
    ("dag.custom_pipeline_fn=m:f", "a graph is a YAML file"),
    ("dag.enable_perf=True", "times are measured in every run"),
    ("dag.backend_threshold=256", "verl chooses"),
    ("dag.env_enable=True", "env_path"),
    ("dag.environment_path=e.py", "env_path"),
    (f"{GPU}.name=vllm", "SGLang"),
    (f"{GPU}.mode=sync", "token ids"),
    (f"{GPU}.agent.agent_name=a", "under `agents`"),
    (f"{GPU}.agent.num_workers=8", "rollout.max_in_flight"),
    (f"{GPU}.agent.custom_async_server=s", "SGLang"),
    (f"{GPU}.multi_turn.enable=True", "max_assistant_turns"),
    (f"{GPU}.free_cache_engine=False", "memory"),
    (f"{GPU}.log_prob_micro_batch_size_per_gpu=16", "ppo_micro_batch_size_per_gpu"),
    (f"{RUN}.ref.log_prob_micro_batch_size_per_gpu=16", "ppo_micro_batch_size_per_gpu"),
    ("data.return_raw_chat=False", "chat messages"),
    ("data.filter_overlong_prompts=True", "prompt_too_long"),
    ("data.truncation=left", "no prompt is ever cut"),
    ("data.shuffle=False", "`seed`"),
    (f"{GPU}.temperature=warm", "a number is needed"),
    (f"{ACTOR}.use_kl_loss=1", "True or False"),
]


def derived(arguments: str, tmp_path: Path):
    out = translate(arguments.split())
    batch_size = int(out.overrides.get("data.train_batch_size", 128))
    (tmp_path / "w.yaml").write_text(edited(WORKFLOW, out.edits, batch_size=batch_size))
    return load_workflow(tmp_path / "w.yaml")


@pytest.mark.parametrize(("arguments", "holds"), IN_THE_WORKFLOW, ids=[arguments for arguments, _ in IN_THE_WORKFLOW])
def test_flag_of_the_workflow(arguments, holds, tmp_path):
    assert holds(derived(arguments, tmp_path))


@pytest.mark.parametrize(("argument", "overrides"), IN_THE_RUN, ids=[argument for argument, _ in IN_THE_RUN])
def test_flag_of_the_run(argument, overrides):
    assert translate([argument]).overrides == overrides


@pytest.mark.parametrize("argument", AS_HERE)
def test_flag_that_says_what_happens_anyway(argument):
    out = translate([argument])
    assert not out.overrides and not out.edits


@pytest.mark.parametrize(("argument", "reason"), REFUSED, ids=[argument for argument, _ in REFUSED])
def test_flag_without_a_meaning_here(argument, reason):
    with pytest.raises(UserError) as error:
        translate([argument])
    assert str(error.value).startswith(argument.partition("=")[0]) and reason in str(error.value)


def test_every_flag_has_a_test():
    cases = [a for a, _ in IN_THE_WORKFLOW] + [a for a, _ in IN_THE_RUN] + AS_HERE + [a for a, _ in REFUSED]
    tested = {argument.partition("=")[0] for case in cases for argument in case.split()}
    assert set(FLAGS) - tested == {"trainer.total_epochs"}  # test_epochs_become_steps
    assert len(FLAGS) > 70


def test_all_refusals_are_told_at_once():
    with pytest.raises(UserError) as error:
        translate([f"{GPU}.name=vllm", "data.train_batch_size=8", "data.shuffle=False"])
    assert [line.partition("=")[0] for line in str(error.value).split("\n")] == [f"{GPU}.name", "error: data.shuffle"]


def test_short_names_and_our_own_keys():
    out = translate(["rollout.n=4", "rollout.max_in_flight=9", "+profile=gpu_32gb", "sandbox.timeout_s=3"])
    assert out.overrides == {
        f"{GPU}.n": "4",
        "rollout.max_in_flight": "9",
        "+profile": "gpu_32gb",
        "sandbox.timeout_s": "3",
    }
    with pytest.raises(UserError, match="key=value"):
        translate(["trainer.nnodes"])


MARFT = WORKFLOW.read_text()
CRITIC = "critic: {lr: 1.0e-5, cliprange_value: 0.5}"


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "recipe").symlink_to(ROOT / "recipe")
    (tmp_path / "envs").symlink_to(ROOT / "envs")
    (tmp_path / "own.yaml").write_text(text)
    return tmp_path / "own.yaml"


def test_shared_critics_keep_their_owners_settings(tmp_path):
    head, _, tail = MARFT.rpartition(CRITIC)
    file = written(tmp_path, f"{head}critic: {{share: reasoner}}{tail}")
    policies = yaml.safe_load(edited(file, {"critic.lr": 2.0}, batch_size=1))["policies"]
    assert policies["reasoner"]["critic"] == {"lr": 2.0, "cliprange_value": 0.5}
    assert policies["actor"]["critic"] == {"share": "reasoner"}


CHAIN = r"estimator: gae_chain\n  gamma.*\n  lam.*\n  whiten.*"
NO_CRITIC = re.sub(CHAIN, "estimator: grpo", MARFT.replace(CRITIC, ""))
NO_ENV = (ROOT / "workflows" / "workflow_no_tool.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "edits", "message"),
    [
        (NO_CRITIC, {"critic.lr": 1}, "no place for critic.lr"),
        (NO_ENV, {"rewards_with_env": True}, "no place for rewards_with_env"),
        (MARFT.replace("kl_loss_coef: 0.01", "kl_reward_coef: 0.01"), {"use_kl_loss": True}, "kl_loss_coef above 0"),
        (MARFT.replace("gae_chain", "gea"), {"algorithm.gamma": 0.5}, "own.yaml:.*gea"),
    ],
)
def test_an_edit_without_a_place_is_refused(text, edits, message, tmp_path):
    with pytest.raises((UserError, WorkflowError), match=message):
        edited(written(tmp_path, text), edits, batch_size=1)


def test_siirls_own_file_is_rewritten_first(tmp_path):
    nodes = [
        {"node_id": "r", "node_type": "MODEL_INFERENCE", "node_role": "ROLLOUT", "agent_group": 0},
        {
            "node_id": "a",
            "node_type": "MODEL_INFERENCE",
            "node_role": "ROLLOUT",
            "agent_group": 1,
            "dependencies": ["r"],
        },
    ]
    for node, name in zip(nodes, ("Reasoner", "Actor"), strict=True):
        node["agent_options"] = {"obs_with_env": True, "process_path": f"recipe/marft/hooks.py:{name}"}
    nodes[1]["agent_options"] |= {"env_path": ["envs/math_env.py:MathEnv"]}
    chain = [
        ("f", "COMPUTE", "REWARD", 1, {}),
        ("lp0", "MODEL_TRAIN", "ACTOR", 0, {"only_forward_compute": True}),
        ("lp1", "MODEL_TRAIN", "ACTOR", 1, {"only_forward_compute": True}),
        ("v0", "MODEL_TRAIN", "CRITIC", 0, {"only_forward_compute": True}),
        ("v1", "MODEL_TRAIN", "CRITIC", 1, {"only_forward_compute": True}),
        ("adv", "COMPUTE", "ADVANTAGE", 1, {}),
        ("c0", "MODEL_TRAIN", "CRITIC", 0, {}),
        ("c1", "MODEL_TRAIN", "CRITIC", 1, {}),
        ("u0", "MODEL_TRAIN", "ACTOR", 0, {}),
        ("u1", "MODEL_TRAIN", "ACTOR", 1, {}),
    ]
    for name, kind, role, group, more in chain:
        last = {"dependencies": [nodes[-1]["node_id"]]}
        nodes.append({"node_id": name, "node_type": kind, "node_role": role, "agent_group": group, **last, **more})
    file = written(tmp_path, yaml.safe_dump({"dag_id": "marft", "nodes": nodes}))
    edits = translate(["algorithm.adv_estimator=gae_marft", "rollout.temperature=0.5", "critic.optim.lr=1e-4"]).edits
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.yaml").write_text(edited(file, edits, batch_size=1))
    flow = load_workflow(tmp_path / "elsewhere" / "w.yaml")
    assert flow.algorithm.estimator == "gae_chain" and len(flow.trained_policies()) == 2
    assert agents(temperature=0.5)(flow) and critics(lr=1e-4)(flow)


def test_epochs_become_steps(tmp_path):
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "train.parquet")
    arguments = [f"workflow={WORKFLOW}", f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=8"]
    overrides, _, text = prepared("qwen2_5_3b", [*arguments, "trainer.total_epochs=3"])
    assert "trainer.total_training_steps=37" in overrides and text is None
    with pytest.raises(UserError, match="total_training_steps"):
        prepared("qwen2_5_3b", [f"workflow={WORKFLOW}", "data.train_files=x.json", "trainer.total_epochs=3"])


SCRIPT = (
    "algorithm.adv_estimator=gae_marft dag.workflow_path={workflow} data.train_files=t.parquet "
    "data.val_files=v.parquet data.train_batch_size=128 data.max_prompt_length=10240 "
    "data.max_response_length=2048 data.truncation=error data.return_raw_chat=True "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.grad_clip=0.5 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.name=sglang "
    "actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.max_model_len=12288 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.3 "
    "actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.enable_chunked_prefill=False "
    "actor_rollout_ref.rollout.agent.rewards_with_env=True "
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 "
    "actor_rollout_ref.rollout.multi_turn.use_all_traj=False critic.optim.lr=1e-5 critic.use_dynamic_bsz=False "
    "critic.cliprange_value=0.5 critic.model.path=Qwen/Qwen2.5-3B-Instruct algorithm.use_kl_in_reward=False "
    "algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.val_before_train=False trainer.save_freq=30 "
    "trainer.test_freq=10"
)
"""A command line in the manner of siiRL's script, without what is refused."""


def test_a_whole_command_line_is_shown_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--show", *SCRIPT.format(workflow=WORKFLOW).split()]) == 0
    overrides, _, text = capsys.readouterr().out.partition("\n\n# ")
    expected = {"workflow=outputs/marft_3b/workflow.yaml", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"}
    assert expected <= set(overrides.splitlines())
    assert "kl_loss_coef: 0.01" in text and list(tmp_path.iterdir()) == []


def test_a_run_gets_the_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("recipe.dag.main.main", lambda argv: started.append(argv) or 0)
    assert main([f"workflow={WORKFLOW}", "data.train_files=t.parquet", "output_dir=out", "algorithm.gamma=0.5"]) == 0
    (argv,) = started
    assert "workflow=out/workflow.yaml" in argv and load_workflow(tmp_path / "out/workflow.yaml").algorithm.gamma == 0.5
    assert main([f"workflow={WORKFLOW}", "data.train_files=t.parquet", "output_dir=plain"]) == 0
    assert f"workflow={WORKFLOW}" in started[1] and not (tmp_path / "plain").exists()


def test_mistakes_are_lines_on_stderr(capsys):
    assert main([f"workflow={WORKFLOW}", "data.shuffle=False"]) == 2
    assert capsys.readouterr().err.startswith("error: data.shuffle=False: ")
    assert main(["workflow=none.yaml", "algorithm.gamma=1"]) == 2
    assert "none.yaml: no such workflow" in capsys.readouterr().err
