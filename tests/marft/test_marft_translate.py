"""A command line as a whole: names, signs, repetitions, what contradicts and what nothing reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipe.dag.core.errors import UserError
from recipe.marft.flags import OWN, SHORT, translate

ROOT = Path(__file__).parents[2]
RUN = "actor_rollout_ref"
GPU = f"{RUN}.rollout"
ACTOR = f"{RUN}.actor"


def test_all_refusals_are_told_at_once():
    with pytest.raises(UserError) as error:
        translate([f"{GPU}.name=vllm", "data.train_batch_size=8", "data.shuffle=False"])
    assert [line.partition("=")[0] for line in str(error.value).split("\n")] == [f"{GPU}.name", "error: data.shuffle"]


def test_short_names_and_our_own_keys():
    out = translate(
        ["rollout.n=4", "rollout.max_in_flight=9", "+profile=gpu_32gb", "sandbox.timeout_s=3", "~trainer.x"]
    )
    assert out.overrides == {
        f"{GPU}.n": "4",
        "rollout.max_in_flight": "9",
        "+profile": "gpu_32gb",
        "sandbox.timeout_s": "3",
        "~trainer.x": None,
    }
    assert translate(["+actor.fsdp_config.x=1"]).overrides == {f"+{ACTOR}.fsdp_config.x": "1"}


def test_no_key_of_ours_is_taken_for_a_short_name():
    ours = yaml.safe_load((ROOT / "recipe" / "dag" / "config" / "dag.yaml").read_text())
    keys = {f"{block}.{key}" for block, values in ours.items() if isinstance(values, dict) for key in values}
    assert {key for key in keys if key.startswith(SHORT)} == set(OWN)


@pytest.mark.parametrize("sign", ["+", "++"])
def test_hydras_signs_do_not_hide_a_flag(sign):
    assert translate([f"{sign}algorithm.gamma=0.9"]).edits["algorithm.gamma"].value == 0.9
    assert translate([f"{sign}rollout.n=2"]).overrides == {f"{GPU}.n": "2"}
    with pytest.raises(UserError, match="data.shuffle=False: "):
        translate([f"{sign}data.shuffle=False"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trainer.nnodes", "^trainer.nnodes: write it as key=value"),
        ("foo", "^foo: write it as key=value"),
        ("=3", "^=3: write it as key=value"),
        ("~", "^~: write it as key=value"),
        ("+++rollout.n=3", r"^\+\+\+rollout.n=3: write it as key=value"),
        ("critic=null", "^critic=null: it is a group of keys"),
        ("~rollout.multi_turn", "^~rollout.multi_turn: it is a group of keys"),
        ("+algorithm.kl_ctrl={}", r"^\+algorithm.kl_ctrl={}: it is a group of keys"),
        ("~algorithm.gamma", "^~algorithm.gamma: a flag cannot be removed"),
        ("~rollout.n=1", "^~rollout.n=1: a flag cannot be removed"),
        (
            "rollout.prompt_length=9 data.max_prompt_length=8",
            f"^data.max_prompt_length=8: {GPU}.prompt_length=9 conflicts",
        ),
        (
            "data.max_response_length=8 rollout.response_length=9",
            f"^{GPU}.response_length=9: data.max_response_length=8",
        ),
        (
            "actor.ppo_micro_batch_size_per_gpu=4 actor.use_dynamic_bsz=True",
            f"^{ACTOR}.ppo_micro_batch_size_per_gpu=4: it has no effect with {ACTOR}.use_dynamic_bsz=True",
        ),
        (
            "critic.use_dynamic_bsz=true critic.ppo_micro_batch_size_per_gpu=4",
            "^critic.ppo_micro_batch_size_per_gpu=4: it has no effect with critic.use_dynamic_bsz=true",
        ),
    ],
)
def test_what_would_be_lost_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        translate(arguments.split())


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("algorithm.norm_adv_by_std_in_grpo=False", "`algorithm.scale`"),
        ("trainer.max_actor_ckpt_to_keep=3", "pass `report.keep_checkpoints=...`"),
        ("data.val_batch_size=3", "all validation problems run at once"),
        ("+algorithm.foo=1", "the workflow's `algorithm` says"),
        ("actor.loss_agg_mode=token-mean", "`algorithm.loss_agg` says this"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "`algorithm.policy_loss` says this"),
        ("rollout.repetition_penalty=1.1", "write `sampling: {repetition_penalty: ...}`"),
        ("critic.model.tokenizer_path=x", "`policies.<name>.model.tokenizer_path`"),
        ("reward_model.enable=True", "a REWARD node"),
        ("reward.num_workers=1", "a REWARD node"),
        ("custom_reward_function.path=f.py", "a REWARD node"),
    ],
)
def test_what_verl_has_and_nothing_here_reads_is_refused(argument, reason):
    with pytest.raises(UserError) as error:
        translate([argument])
    assert str(error.value).startswith(f"{argument}: ") and reason in str(error.value)


@pytest.mark.parametrize(
    "argument", ["actor.optim.weight_decay=0.1", "critic.optim.betas=[0.9,0.9]", "rollout.max_num_seqs=8", "seed=1"]
)
def test_what_verl_reads_goes_on(argument):
    key, _, value = argument.partition("=")
    (item,) = translate([argument]).overrides.items()
    assert item[0].endswith(key) and item[1] == value


def test_a_flag_that_is_given_again_counts_as_given_last():
    out = translate(["trainer.logger=[console]", "trainer.logger=[file]", "algorithm.lam=0.1", "algorithm.lam=0.2"])
    assert (out.overrides, out.edits["algorithm.lam"].value) == ({"trainer.logger": "[file]"}, 0.2)
    agreeing = translate(["data.max_response_length=64", "rollout.response_length=64"])
    assert agreeing.overrides == {"data.max_response_length": "64"}
