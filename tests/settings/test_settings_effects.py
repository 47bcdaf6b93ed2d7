"""Typed keys that only count together with the workflow or with another key."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.compose import compose_config, run_schema, typed_settings
from recipe.dag.settings.effects import NEEDS, check_effects

ROOT = Path(__file__).parents[2]
RUN = "actor_rollout_ref"
TEXT = """\
dag_id: demo
agents: [{name: a, policy: p}]
policies: {p: {model: {path: WEIGHTS}, lr: LR, config: CONFIG}}
algorithm: {estimator: grpo}
nodes:
  - {id: a, agent: a}
  - {id: r, reward: "json:dumps", after: a}
"""


@pytest.fixture
def check(tmp_path):
    def check(arguments: str, *, lr="null", config="{}", model="m", tools="", node="", name="dag", **run):
        path = tmp_path / "workflow.yaml"
        text = TEXT.replace("LR", lr).replace("CONFIG", config).replace("WEIGHTS", model)
        path.write_text(text.replace("policy: p}", f"policy: p{tools}}}").replace("agent: a}", f"agent: a{node}}}"))
        typed = [f"workflow={path}", *arguments.split()]
        check_effects(typed_settings(typed), compose_config(name, typed), load_workflow(path), **run)

    return check


@pytest.mark.parametrize(
    ("argument", "cure", "message"),
    [
        (f"{RUN}.actor.ppo_micro_batch_size_per_gpu=4", f"{RUN}.actor.use_dynamic_bsz=false", "made by tokens; add"),
        (
            f"{RUN}.actor.optim.min_lr_ratio=0.1",
            f"{RUN}.actor.optim.lr_scheduler_type=cosine",
            "only a cosine schedule",
        ),
        (f"{RUN}.actor.optim.num_cycles=1.0", f"{RUN}.actor.optim.warmup_style=cosine", "only a cosine schedule"),
        (f"{RUN}.actor.fsdp_config.pad_to_length_bucket=64", f"{RUN}.actor.pad_to_length=true", "not padded"),
        (
            "trainer.resume_from_path=x",
            "trainer.resume_mode=resume_path",
            "only the modes resume_path and force read it",
        ),
        ("trainer.resume_from_path=x", "trainer.resume_mode=force", "only the modes resume_path and force read it"),
        ("sandbox.margin_s=4", "sandbox.url=http://x", "only a server at sandbox.url"),
        ("validation.metrics_freq=4", "validation.metrics=own.py:f", "it is how often that is called"),
    ],
)
def test_a_key_that_needs_another_is_refused_without_it(check, argument, cure, message):
    with pytest.raises(UserError) as refused:
        check(argument)
    assert str(refused.value).startswith(f"{argument}: ") and message in str(refused.value)
    assert "\n" not in str(refused.value)
    check(f"{argument} {cure}")


def test_what_to_do_about_flags_needs_a_rule(check):
    check("report.on_flag=mask")
    with pytest.raises(UserError, match=r"^report.on_flag=mask: no rule is on; add report.monitors=all$"):
        check("report.on_flag=mask report.monitors=[]")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("critic.optim.weight_decay=0", ""),
        ("critic.fsdp.param_offload=true", "computed by their base's trainer; set this below actor_rollout_ref"),
        ("critic.checkpoint.save_contents=[model]", "a checkpoint always has all of an adapter"),
        (f"{RUN}.actor.checkpoint.save_contents=[model]", "a checkpoint always has all of an adapter"),
    ],
)
def test_keys_that_adapters_and_their_critics_have_from_their_base(tmp_path, argument, message):
    path = tmp_path / "workflow.yaml"
    adapter = "{base: {model: {path: m}, frozen: true}, p: {lora: {base: base}, critic: {}}}"
    path.write_text(
        TEXT.replace("{p: {model: {path: WEIGHTS}, lr: LR, config: CONFIG}}", adapter).replace("grpo", "gae")
    )
    typed = [f"workflow={path}", argument]
    try:
        check_effects(typed_settings(typed), compose_config("dag", typed), load_workflow(path))
    except UserError as refused:
        assert message and message in str(refused)
    else:
        assert not message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("critic.optim.weight_decay=0", "no policy of the workflow has a critic (estimator grpo); remove it"),
        (f"{RUN}.ref.fsdp_config.fsdp_size=2", "no policy keeps a reference"),
        (f"{RUN}.actor.kl_loss_type=k3", "there is no KL in the loss; set `algorithm.kl_loss_coef`"),
        ("validation.temperature=0.5", "only `verl-dag eval` reads it"),
    ],
)
def test_what_the_workflow_does_not_use_is_refused_in_training_only(check, argument, message):
    with pytest.raises(UserError) as refused:
        check(argument)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    check(argument, evaluate_only=True)


@pytest.mark.parametrize("evaluate_only", [False, True])
@pytest.mark.parametrize("argument", ["sandbox.timeout_s=1", "sandbox.memory_mb=64"])
def test_a_default_of_programs_is_refused_where_none_takes_it(check, argument, evaluate_only):
    option = argument.partition("=")[0].removeprefix("sandbox.")
    own = f", tools: [{{name: code_interpreter, {option}: 9}}]"
    for tools, message in (("", "no agent has the tool"), (own, f"`{option}` of the tool")):
        with pytest.raises(UserError, match=f"^{argument}: [^\n]*{message}[^\n]*$"):
            check(argument, tools=tools, evaluate_only=evaluate_only)
    check(argument, tools=", tools: [code_interpreter]", evaluate_only=evaluate_only)


def test_a_limit_that_a_hook_always_sets_hides_the_runs(check, tmp_path):
    (tmp_path / "h.py").write_text("class H:\n    def parse(self, context, *, code_timeout=None): ...\n")
    hooks = {"tools": ", tools: [code_interpreter]", "node": ", hooks: h.py:H"}
    check("sandbox.timeout_s=1", **hooks)
    hooks["node"] += ", parse_options: {code_timeout: 20}"
    with pytest.raises(UserError, match="`code_timeout` of the hooks"):
        check("sandbox.timeout_s=1", **hooks)
    check("sandbox.memory_mb=64", **hooks)


@pytest.mark.parametrize(
    ("name", "argument"), [("dag", "data.max_response_length=9"), ("ma_retool_ma", "default_agent.generate_max_len=9")]
)
def test_a_limit_of_calls_is_refused_where_a_server_plays_every_policy(check, name, argument):
    check(argument, name=name, evaluate_only=True)
    with pytest.raises(UserError, match=f"^{argument}: [^\n]*pass workflow.agents.[*].sampling.max_tokens=N[^\n]*$"):
        check(argument, name=name, evaluate_only=True, all_by_api=True)


def test_what_every_policy_sets_itself_is_not_set_by_the_run(check):
    lr, decay = f"{RUN}.actor.optim.lr=1e-5", f"{RUN}.actor.optim.weight_decay=0"
    check(f"{lr} {decay}")
    with pytest.raises(UserError, match=r"the workflow itself says 1e-06 \(`policies.<name>.lr`"):
        check(lr, lr="1.0e-6")
    with pytest.raises(UserError, match=r"the workflow itself says 0.1 \(`policies.<name>.config`"):
        check(decay, config="{actor.optim.weight_decay: 0.1}")
    check(lr, lr="1.0e-5")
    check(decay, config="{actor.optim.weight_decay: 0}")


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.resume_from_path=null",
        f"{RUN}.actor.ppo_micro_batch_size_per_gpu=null",
        f"{RUN}.ref.fsdp_config.param_offload=True",
        "critic.model.lora_rank=0",
    ],
)
def test_a_key_that_says_what_happens_anyway_is_no_mistake(check, argument):
    check(argument)


def test_a_policys_own_config_may_make_a_key_count(check):
    check(f"{RUN}.actor.ppo_micro_batch_size_per_gpu=4", config="{actor.use_dynamic_bsz: false}")


@pytest.mark.parametrize("evaluate_only", [False, True])
def test_a_model_that_no_policy_asks_for_is_refused(check, evaluate_only):
    with pytest.raises(UserError, match=r"^model_path=other: no policy's model is \$\{oc.env:MODEL_PATH\}"):
        check("model_path=other", evaluate_only=evaluate_only)
    check("model_path=other", model='"${oc.env:MODEL_PATH}"', evaluate_only=evaluate_only)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("default_agent.pretrain=other", "no policy's model is"),
        ("default_agent.temperature=0.5", "only `verl-dag eval` reads it"),
    ],
)
def test_a_key_that_stands_for_another_is_checked_as_that_one(check, argument, message):
    with pytest.raises(UserError) as refused:
        check(argument, name="ma_retool_ma")
    assert str(refused.value).startswith(f"{argument}: ") and message in str(refused.value)
    check("default_agent.pretrain=other", name="ma_retool_ma", model='"${oc.env:MODEL_PATH}"')
    check("default_agent.temperature=0.5", name="ma_retool_ma", evaluate_only=True)


def test_the_table_names_keys_that_a_run_reads():
    named = [*NEEDS, *(other for other, *_ in NEEDS.values())]
    assert [key for key in named if not run_schema().is_read(key)] == []
