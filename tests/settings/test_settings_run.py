"""What a user types or writes into a configuration file: in force, or refused in one line before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.dag.app import cli, launch, main
from recipe.dag.core.errors import UserError
from recipe.dag.settings.compose import compose_config

ROOT = Path(__file__).parents[2]
WORKFLOW = str(ROOT / "workflows" / "workflow_grpo.yaml")
RUN = "actor_rollout_ref"


def composed(*overrides: str, name: str = "dag", folder: Path | None = None):
    return compose_config(name, [f"workflow={WORKFLOW}", *overrides], folder)


NOT_READ = "verl has this key, but nothing here reads it; remove it (docs/migrating.md"
DEAD = {
    "algorithm.adv_estimator=gae": "`algorithm.estimator` says this; set it in the workflow",
    "algorithm.adv_estimator=grpo": "`algorithm.estimator` says this; set it in the workflow",
    "algorithm.gamma=0.9": "`algorithm.gamma` of the workflow says this; set it there",
    "algorithm.lam=0.9": "`algorithm.lam` of the workflow says this; set it there",
    "algorithm.use_kl_in_reward=true": "`algorithm.kl_reward_coef`",
    "algorithm.rollout_correction.rollout_is=token": "`algorithm.importance`",
    f"{RUN}.actor.clip_ratio=0.3": "`algorithm.clip_ratio_low`",
    f"{RUN}.actor.clip_ratio_high=0.28": "`algorithm.clip_ratio_high` says this, for all policies; set it in ",
    f"{RUN}.actor.clip_ratio_high=0.2": "`algorithm.clip_ratio_high`",
    f"{RUN}.actor.use_kl_loss=true": "`algorithm.kl_loss_coef`",
    f"{RUN}.actor.kl_loss_coef=0.01": "`algorithm.kl_loss_coef`",
    f"{RUN}.actor.entropy_coeff=0.01": "`algorithm.entropy_coef`",
    f"{RUN}.actor.loss_agg_mode=token-mean": "`algorithm.loss_agg`",
    f"{RUN}.actor.ppo_mini_batch_size=8": "`algorithm.mini_batches`",
    f"{RUN}.actor.ppo_epochs=2": "`algorithm.epochs`",
    f"{RUN}.actor.policy_loss.loss_mode=gspo": "`algorithm.policy_loss`",
    f"{RUN}.actor.grad_clip=0.5": f"nothing reads it; write `{RUN}.actor.optim.clip_grad`",
    f"{RUN}.model.lora_rank=8": "`policies.<name>.lora` says this; set it there",
    f"{RUN}.model.path=org/model": "pass `model_path=...`",
    f"{RUN}.rollout.temperature=0.7": "write `sampling: {temperature: ...}` of the agent",
    f"{RUN}.rollout.val_kwargs.n=4": "nothing reads it; pass `validation.n=...`",
    f"{RUN}.rollout.multi_turn.enable=true": "`episode.max_turns`",
    f"{RUN}.rollout.enable_prefix_caching=false": f"`{RUN}.rollout.engine_kwargs.sglang.disable_radix_cache` is true",
    f"{RUN}.rollout.name=vllm": "the run chooses the server",
    f"{RUN}.ref.fsdp_config.param_offload=false": NOT_READ,
    f"{RUN}.actor.fsdp_config.use_orig_params=true": NOT_READ,
    f"{RUN}.actor.qat=3": NOT_READ,
    "critic.optim.total_training_steps=3": NOT_READ,
    "critic.model.use_remove_padding=false": f"pass `{RUN}.model.use_remove_padding=...`",
    "trainer.total_epochs=3": "pass `trainer.total_training_steps=...`",
    "trainer.critic_warmup=3": "`algorithm.critic_warmup`",
    "trainer.balance_batch=false": NOT_READ,
    "trainer.val_only=true": "`verl-dag eval",
    "trainer.rollout_data_dir=out": "episodes.jsonl",
    "trainer.max_actor_ckpt_to_keep=3": "pass `report.keep_checkpoints=...`",
    "trainer.log_val_generations=3": "episodes.jsonl",
    "data.shuffle=false": "follows from `seed=...`",
    "data.val_batch_size=3": "`rollout.max_in_flight=...`",
    "data.filter_overlong_prompts=true": "ends unanswered",
    "custom_reward_function.path=reward.py": "a REWARD node of the workflow",
    "reward_model.enable=true": "a REWARD node of the workflow",
    "reward.reward_manager.name=dapo": "a REWARD node of the workflow",
    "reward.sandbox_fusion.url=http://x": "pass `sandbox.url=...`",
    "model_engine=megatron": NOT_READ,
    "global_profiler.tool=torch": NOT_READ,
    "hydra.run.dir=out": "`output_dir=...`",
    "algorithm.epochs=2": "`algorithm.epochs` of the workflow says this; set it there",
    "episode.max_turns=2": "`episode.max_turns` of the workflow says this; set it there",
    "agents=[]": "`agents` is part of the workflow",
}


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_each_key_that_nothing_reads_is_refused_with_what_says_it(sign):
    with pytest.raises(UserError) as refused:
        composed(*(f"{sign}{argument}" for argument in DEAD))
    lines = str(refused.value).split("\nerror: ")
    for (argument, message), line in zip(DEAD.items(), lines, strict=True):
        assert line.startswith(f"{sign}{argument}: ") and message in line and "\n" not in line


@pytest.mark.parametrize(
    "argument",
    ["data.shuffle=true", "data.truncation=error", "trainer.balance_batch=true", f"{RUN}.rollout.name=sglang",
     f"{RUN}.rollout.mode=async", f"{RUN}.hybrid_engine=true", "trainer.val_only=false",
     f"{RUN}.ref.fsdp_config.param_offload=true", "reward_model.enable=false", "model_engine=dp"],
)  # fmt: skip
def test_a_key_may_say_what_happens_anyway(argument):
    composed(argument)


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        (f"{RUN}.actor.optim.lr=3e-6", f"{RUN}.actor.optim.lr", 3e-6),
        (f"+{RUN}.rollout.n=4", f"{RUN}.rollout.n", 4),
        (f"++{RUN}.rollout.gpu_memory_utilization=0.3", f"{RUN}.rollout.gpu_memory_utilization", 0.3),
        (f"{RUN}.rollout.engine_kwargs.sglang.attention_backend=fa3",
         f"{RUN}.rollout.engine_kwargs.sglang.attention_backend", "fa3"),
        (f"+{RUN}.model.override_config.attn_implementation=sdpa",
         f"{RUN}.model.override_config.attn_implementation", "sdpa"),
        (f"{RUN}.actor.fsdp_config.mixed_precision.param_dtype=fp32",
         f"{RUN}.actor.fsdp_config.mixed_precision.param_dtype", "fp32"),
        (f"{RUN}.actor.optim={{lr: 1e-6, weight_decay: 0}}", f"{RUN}.actor.optim.weight_decay", 0),
        ("+ray_kwargs.ray_init.address=auto", "ray_kwargs.ray_init.address", "auto"),
        ("trainer.experiment_name=2026", "trainer.experiment_name", "2026"),
        ("output_dir='out puts/${seed}'", "output_dir", "out puts/0"),
        ("trainer.logger=console", "trainer.logger", "console"),
        ("trainer.logger=[]", "trainer.logger", []),
        ("data.train_files=[a,b]", "data.train_files", ["a", "b"]),
        ("data.train_max_samples=null", "data.train_max_samples", None),
        ("profile=gpu_32gb", "data.max_response_length", 1024),
        ("+profile=gpu_32gb", f"{RUN}.actor.fsdp_config.offload_policy", True),
    ],
)  # fmt: skip
def test_what_is_read_arrives_with_or_without_a_plus(argument, key, value):
    assert OmegaConf.select(composed(argument), key) == value


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.totl_training_steps=3", "unknown key; did you mean `trainer.total_training_steps`?"),
        ("+trainer.totl_training_steps=3", "unknown key; did you mean `trainer.total_training_steps`?"),
        ("++trainer.steps_total=3", "unknown key"),
        ("optim.lr=1e-5", f"unknown key; did you mean `{RUN}.actor.optim.lr`?"),
        ("rollout.n=8", f"unknown key; did you mean `{RUN}.rollout.n`?"),
        (f"{RUN}.rollout.gpu_memory_utilisation=0.3", f"did you mean `{RUN}.rollout.gpu_memory_utilization`?"),
        ("use_wandb=KEY", "unknown key; a key of MARTI's; export WANDB_API_KEY=KEY"),
        ("workflow_args.coder_max_turns=2", "pass workflow.loops.act.max_rounds=N (docs/migrating.md"),
        ("workflow_args.coder_prompt=x", "pass workflow.<key>=VALUE"),
        ("default_agent.pretrain=m", "pass model_path=MODEL"),
        ("zzz=3", "unknown key; recipe/dag/config/dag.yaml lists the run's keys"),
        ("trainer=3", "is a block of keys; set one of them, such as trainer."),
        ("~trainer.logger", "a key cannot be deleted; leave it out, or pass trainer.logger=VALUE"),
        ("actor@actor_rollout_ref.actor=megatron_actor", "`@` chooses one of verl's configuration files"),
        ("seed=1,2", "one run takes one value"),
        ("trainer.logger", "write it as key=value"),
        ("output_dir=a=b,c", "hydra cannot parse the value; quote it: output_dir=\"'a=b,c'\""),
        ("trainer.total_training_steps=five", "it takes a whole number, 1 or more"),
        ("trainer.total_training_steps=0", "it takes a whole number, 1 or more"),
        ("trainer.total_training_steps=2.5", "it takes a whole number, 1 or more"),
        ("trainer.total_training_steps=null", "it takes a whole number, 1 or more"),
        ("trainer.n_gpus_per_node=two", "it takes a whole number, 1 or more"),
        ("trainer.save_freq=often", "it takes a whole number, 1 or more (0, -1 is off)"),
        ("trainer.val_before_train=maybe", "it takes True or False"),
        ("trainer.val_before_train=1", "it takes True or False"),
        ("trainer.logger=[consol]", "it takes a list [...] of console"),
        ("data.train_batch_size=[4]", "it takes a whole number, 1 or more"),
        ("data.max_prompt_length=2k", "it takes a whole number, 1 or more"),
        ("seed=-1", "it takes a whole number, 0 or more"),
        ("sandbox.timeout_s=long", "it takes a number above 0"),
        ("validation.temperature=hot", "it takes a number, or null"),
        ("report.keep_checkpoints=all", "it takes a whole number"),
        (f"{RUN}.actor.optim.lr=fast", "it takes a number of at least 0"),
        (f"{RUN}.actor.optim.lr_scheduler_type=linear", "it takes one of constant, cosine"),
        (f"{RUN}.actor.use_dynamic_bsz=5", "it takes True or False"),
        (f"{RUN}.actor.strategy=megatron", "it takes one of fsdp2"),
        (f"{RUN}.actor.checkpoint.save_contents=[weights]", "it takes a list [...] of model, optimizer"),
        (f"{RUN}.rollout.gpu_memory_utilization=1.5", "it takes a number above 0, up to 1"),
        (f"{RUN}.rollout.max_model_len=long", "it takes a whole number, 1 or more, or null"),
        ("ray_kwargs.ray_init.num_cpus=four", "it takes a whole number, 1 or more, or null"),
    ],
)  # fmt: skip
def test_unknown_keys_and_wrong_values_are_one_line_without_hydras_advice(argument, message):
    with pytest.raises(UserError) as refused:
        composed(argument)
    text = str(refused.value)
    assert message in text and argument.split("=")[0] in text and "\n" not in text
    assert "To append" not in text and "use +" not in text


def test_a_configuration_of_marti_is_named_as_a_script():
    with pytest.raises(UserError, match=r"does not exist; MARTI's configuration .* is bash recipe/mathchat/run_train_"):
        compose_config("mathchat_with_coach", [])


def test_an_interpolation_that_leads_nowhere_is_one_line():
    with pytest.raises(UserError, match=r"^configuration: Interpolation key 'none' not found"):
        composed("output_dir=${none}")


def test_each_wrong_key_has_a_line():
    with pytest.raises(UserError) as refused:
        composed("algorithm.gamma=0.9", "trainer.total_epochs=3", "data.sed=1")
    assert [line.partition("=")[0] for line in str(refused.value).splitlines()] == [
        "algorithm.gamma", "error: trainer.total_epochs", "error: data.sed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: {adv_estimator: rloo}", "configuration: algorithm.adv_estimator: `algorithm.estimator` says this"),
        ("trainer: {total_epochs: 3}", "configuration: trainer.total_epochs: there are no epochs"),
        (
            f"{RUN}: {{actor: {{clip_ratio_high: 0.28}}}}",
            f"configuration: {RUN}.actor.clip_ratio_high: `algorithm.clip",
        ),
        ("trainer: {totl_training_steps: 3}", "configuration: trainer.totl_training_steps: unknown key; did you mean"),
        ("trainer: {total_training_steps: five}", "configuration: trainer.total_training_steps=five: it takes a whole"),
        ("mine: 3", "configuration: mine: unknown key"),
    ],
)
def test_a_configuration_file_is_held_to_the_same(text, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [dag, _self_]\n{text}\n")
    with pytest.raises(UserError) as refused:
        composed(name="mine", folder=tmp_path)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_configuration_file_may_have_keys_of_its_own_that_others_take_their_value_from(tmp_path):
    text = "defaults: [dag, _self_]\nsteps: 7\ntrainer: {total_training_steps: '${steps}'}\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert composed(name="mine", folder=tmp_path).trainer.total_training_steps == 7
    assert composed("steps=9", name="mine", folder=tmp_path).trainer.total_training_steps == 9


@pytest.mark.parametrize(
    "argument",
    ["trainer.total_training_steps=five", "algorithm.adv_estimator=gae", "+data.sed=1", "sandbox.margin_s=4"],
)
@pytest.mark.parametrize("entry", ["main", "main --eval", "main --check", "train", "eval", "plan", "doctor"])
def test_every_entry_point_ends_with_one_line_and_exit_code_2(entry, argument, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_environment", lambda platform: pytest.fail("a run was started"))
    files = [f"workflow={WORKFLOW}", "data.train_files=t.parquet", argument]
    if entry.startswith("main"):
        code = main.main([*entry.split()[1:], *files])
    else:
        command = ["train", *files] if entry == "train" else [entry, WORKFLOW, argument]
        monkeypatch.setattr("sys.argv", ["verl-dag", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1 and argument in err and not list(tmp_path.iterdir())
