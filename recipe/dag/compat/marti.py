"""Where configurations and keys of MARTI and of MAPPA's fork of it are here, for error messages.

Invariant: facts only; docs/migrating.md shows the commands side by side.
"""

from __future__ import annotations

_PAGE = "docs/migrating.md has MARTI's commands side by side with ours"
_CONFIGS = {
    "mathchat_with_coach": "bash recipe/mathchat/run_train_mathchat.sh MODEL [KEY]",
    "dsbench_with_coach": "bash recipe/dsbench/run_train_dsbench.sh MODEL [KEY]",
}
_KEYS = {
    "use_wandb": "export WANDB_API_KEY=KEY, or pass trainer.logger=[console,wandb]",
    "workflow_args.coder_max_turns": "pass workflow.loops.act.max_rounds=N",
    "workflow_args.code_timeout": "pass sandbox.timeout_s=SECONDS",
    "workflow_args": "options of agents, nodes and prompts are in the workflow: pass workflow.<key>=VALUE",
    "workflow_func_path": "the graph is a YAML file: pass workflow=FILE",
    "tools_config": "tools are in the workflow: write `tools: {...}` there",
    "reward_alloc": "rewards are in the workflow: write a node with `reward: file.py:function` there",
    "default_agent.pretrain": "pass model_path=MODEL",
    "default_agent.save_path": "pass output_dir=FOLDER",
    "default_agent.rollout_batch_size": "pass data.train_batch_size=N",
    "default_agent.n_samples_per_prompt": "pass actor_rollout_ref.rollout.n=N",
    "default_agent.actor_learning_rate": "pass actor_rollout_ref.actor.optim.lr=RATE",
    "default_agent": "agents and policies are in the workflow: pass workflow.<key>=VALUE",
    "prompt_data": "pass data.train_files=FILE",
    "eval_data": "pass data.val_files=FILE",
    "label_key": "pass data.label_key=NAME",
    "input_key": "pass data.input_key=NAME",
}
"""Key, or the start of keys -> what to write here."""


def configuration_hint(name: str) -> str | None:
    """Return what replaces one of MARTI's configurations; None for another name."""
    command = _CONFIGS.get(name)
    return f"MARTI's configuration {name} is {command}; {_PAGE}" if command else None


def key_hint(key: str) -> str | None:
    """Return what replaces one of MARTI's keys; None for another key."""
    start = key
    while start and start not in _KEYS:
        start = start.rpartition(".")[0]
    return f"a key of MARTI's; {_KEYS[start]} ({_PAGE})" if start else None
