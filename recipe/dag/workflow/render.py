"""A plan as text for a terminal, or as JSON.

Invariant: equal plans give equal text, so the output can be compared and committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recipe.dag.core.counted import counted
from recipe.dag.workflow.memory import GB, REFERENCE, PolicyMemory, PoolMemory
from recipe.dag.workflow.mermaid import step_name, to_mermaid
from recipe.dag.workflow.node import EPISODE_KINDS, Kind
from recipe.dag.workflow.plan import Plan, PlannedAgent, PlannedLoop, PlannedNode, PlannedPolicy
from recipe.dag.workflow.trainer_memory import ADAM, ADAM_8BIT, BF16, GRADIENT, MASTER
from recipe.dag.workflow.training_chain import is_derived

__all__ = ["to_json", "to_mermaid", "to_text"]

WIDTH = 160
CLIP = (0.2, 0.2)
"""PPO's default, which is not printed."""
PARTS = ("weights", "gradients", "optimizer", "activations", "servers", "processes", "used")
"""Columns of a GPU's memory."""


def to_json(plan: Plan) -> str:
    return plan.model_dump_json(indent=2)


def to_text(plan: Plan) -> str:
    lines = [f"{plan.dag_id} ({plan.file})"]
    lines += [" ".join(plan.description.split())] if plan.description.strip() else []
    header = ["group", "name", "policy", "nodes", "sampling", "tools"]
    lines += ["", "Agents", *_table(header, map(_agent_row, plan.agents))]
    header = ["name", "model", "weights", "critic", "agents", "GPUs"]
    lines += ["", "Policies", *_table(header, map(_policy_row, plan.policies))]
    turns = f"{'up to ' * (plan.max_turns > 1)}{counted(plan.max_turns, 'turn')}"
    lines += ["", f"Rollout ({turns} per episode; nodes of one line run in parallel)", *_numbered(plan, plan.rollout)]
    lines += ["", "Loops", *map(_loop, plan.loops)] if plan.loops else []
    lines += ["", "Scoring", *(_numbered(plan, plan.scoring) or ["  the env's rewards"])]
    lines += ["", f"Training ({'derived' if plan.training_derived else 'declared'}; {_credit(plan)})"]
    lines += _numbered(plan, plan.training) or ["  none: every policy is frozen"]
    lines += ["", "Generated tokens per episode, at most (prompts and tool results come on top)"]
    budget = [(f"agent {agent.name}", agent.max_generated_tokens, _product(plan, agent)) for agent in plan.agents]
    budget += [(f"policy {policy.name}", policy.max_generated_tokens, "") for policy in plan.policies]
    budget += [("total", plan.max_generated_tokens, "")]
    if plan.max_forks:
        with_forks = plan.max_generated_tokens * (1 + plan.max_forks)
        forks = f"up to {counted(plan.max_forks, 'fork')}; each repeats what precedes it"
        budget += [("with forks", with_forks, forks)]
    lines += _table(None, [[name, f"{tokens:,}", how] for name, tokens, how in budget])
    lines += _states_table(plan.memory) if plan.memory else []
    lines += ["", *plan.choices, *_gpu_table(plan.gpus)] if plan.gpus else []
    lines += ["", plan.no_gpus] if plan.no_gpus else []
    lines += ["", *plan.sharing] if plan.sharing else []
    return "\n".join(line.rstrip() for line in lines)


def _agent_row(agent: PlannedAgent) -> list[str]:
    sampling = agent.sampling
    parts = [f"temperature {sampling.temperature:g}", f"max_tokens {sampling.max_tokens}"]
    parts += [f"thinking_tokens {sampling.thinking_tokens}"] if sampling.thinking_tokens else []
    parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"top_k {sampling.top_k}"] if sampling.top_k > 0 else []
    parts += [f"min_p {sampling.min_p:g}"] if sampling.min_p > 0 else []
    parts += [f"repetition_penalty {sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    parts += [f"presence_penalty {sampling.presence_penalty:g}"] if sampling.presence_penalty else []
    parts += [f"frequency_penalty {sampling.frequency_penalty:g}"] if sampling.frequency_penalty else []
    parts += [f"stop {' '.join(map(repr, sampling.stop))}"] if sampling.stop else []
    parts += ["ignore_eos"] if sampling.ignore_eos else []
    parts += [f"memory: {agent.memory}"] if agent.memory != "none" else []
    loop = agent.tool_loop
    how = " (called by its hook)"
    if loop:
        how = f" ({loop.format} loop, up to {counted(loop.max_generations, 'generation')})"
    tools = ", ".join(agent.tools) + how if agent.tools else "-"
    return [str(agent.agent_group), agent.name, agent.policy, ", ".join(agent.nodes), ", ".join(parts), tools]


def _policy_row(policy: PlannedPolicy) -> list[str]:
    weights = "trained" if policy.trained else "frozen"
    weights = f"snapshot of {policy.snapshot}" if policy.snapshot is not None else weights
    weights += f" at lr {policy.lr:g}" if policy.lr is not None else ""
    weights += f" in turns of {counted(policy.train_cycle, 'step')}" if policy.train_cycle else ""
    weights += ", reference kept" if policy.reference and policy.refresh is None else ""
    weights += f", reference renewed every {counted(policy.refresh, 'step')}" if policy.refresh is not None else ""
    critic = {None: "-", policy.name: "its own"}.get(policy.critic, f"that of {policy.critic}")
    shared = " (shared)" if len(policy.agents) > 1 else ""
    agents = ", ".join(policy.agents) + shared
    gpus = "none" if policy.behind_api else str(policy.gpus or "shared")
    return [policy.name, policy.path, weights, critic, agents, gpus]


def _loop(loop: PlannedLoop) -> str:
    rounds = counted(loop.max_rounds, "round")
    bound = f"up to {rounds}, until {loop.until}" if loop.until else rounds
    return f"  {loop.name}: {', '.join(loop.nodes)}; {bound}"


def _numbered(plan: Plan, levels: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for number, level in enumerate(levels, 1):
        cells = [_cell(plan.node(name)) for name in level]
        row = f"  {number}. {' | '.join(cells)}"
        indent = " " * (len(str(number)) + 3)
        lines += [row] if len(row) <= WIDTH else [f"  {number}. {cells[0]}", *(f"{indent}| {c}" for c in cells[1:])]
    return lines


def _cell(node: PlannedNode) -> str:
    if is_derived(node.id):
        return node.id
    inside = node.kind in EPISODE_KINDS
    parts = [node.agent or (node.kind == Kind.REWARD and node.runs) or step_name(node)]
    parts += [node.runs] if inside and node.runs else []
    parts += [f"after {', '.join(node.after)}"] if inside and node.after else []
    parts += ["scores the group"] if node.of_group else []
    parts += [node.candidates] if node.candidates else []
    parts += [f"if {node.when}"] if node.when else []
    parts += [f"env {' or '.join(node.envs)}"] if node.envs else []
    return f"{node.id} [{', '.join(parts)}]"


def _credit(plan: Plan) -> str:
    groups = f", groups by {', '.join(plan.group_by)}" if plan.group_by else ""
    groups += f", rewards to go at gamma_turn {plan.gamma_turn:g}" if plan.gamma_turn is not None else ""
    groups += f", weights by uncertainty (alpha {plan.uncertainty:g})" if plan.uncertainty is not None else ""
    low, high = plan.clip
    loss = f", loss {plan.policy_loss}" if plan.policy_loss != "vanilla" else ""
    if plan.clip != CLIP:
        loss += f", ratios clipped at 1 - {low:g} and 1 + {high:g}"
    loss += f", {plan.importance}" if plan.importance else ""
    loss += "".join(f", {part}" for part in plan.outside_loss)
    order = ""
    if plan.happo_order and plan.happo_factor:
        how = f"{plan.happo_order.replace('_', ' ')}; factor {plan.happo_factor.replace('_', ' ')}"
        order = f", policies one after the other ({how})"
    if plan.exchange and plan.exchange_every:
        steps = f"{plan.exchange_every} steps" if plan.exchange_every > 1 else "step"
        order += f", {' and '.join(plan.exchange)} exchange policies every {steps}"
    sampling = f", up to {plan.max_batches} batches a step" if plan.max_batches > 1 else ""
    return f"estimator {plan.estimator}{groups}{loss}{order}{sampling}"


def _product(plan: Plan, agent: PlannedAgent) -> str:
    generations = agent.tool_loop.max_generations if agent.tool_loop else 1
    moves = (len(agent.nodes), "node") if agent.moves == len(agent.nodes) else (agent.moves, "move")
    factors = [moves, (plan.max_turns, "turn"), (generations, "generation")]
    factors += [(agent.sampling.most_tokens, "token")]
    return " x ".join(counted(count, noun) for count, noun in factors)


def _states_table(memory: Sequence[PolicyMemory]) -> list[str]:
    # a base, which has weights in the trainer and no optimizer
    based = f" (of a base {BF16})" if any(states.weights and not states.optimizer for states in memory) else ""
    fp32 = f"weights {MASTER}{based}, gradients {GRADIENT}, Adam {ADAM}, reference {REFERENCE}"
    bytes_each = f"{fp32} (fp32), 8-bit Adam {ADAM_8BIT:.0f}, serving {BF16} (bf16)"
    title = f"Memory in GB, over all devices (bytes per parameter: {bytes_each})"
    header = ["policy", "parameters", "weights", "gradients", "Adam", "reference", "critic", "serving", "total"]
    rows = [[states.policy, _count(states.parameters), *map(_size, (*states.parts, states.total))] for states in memory]
    why = [f"  {states.policy} is unknown: {states.unknown}" for states in memory if states.parameters is None]
    return ["", title, *_table(header, rows), *why]


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "unknown"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e7 else f"{parameters / 1e6:.2f} M"


def _size(size: int | None) -> str:
    if not size:
        return "-"
    return f"{size / GB:.1f}" if size >= GB / 20 else f"{size / GB:.3f}"


def _gpu_table(pools: Sequence[PoolMemory]) -> list[str]:
    """Return, for each pool, a table of each GPU's memory at its peaks, and the verdict."""
    lines = []
    for pool in pools:
        gpus = "1 GPU" if pool.gpus == 1 else f"each of {pool.gpus} GPUs"
        title = (
            f"Memory of {gpus} with {', '.join(pool.policies)}, in GB (estimate; {pool.available / GB:.1f} available)"
        )
        rows = [[phase.name, *(f"{getattr(phase, part) / GB:.1f}" for part in PARTS)] for phase in pool.phases]
        lines += ["", title, *_table(["at the fullest of", *PARTS], rows)]
        room = ", ".join(f"{name} {tokens:,} tokens" for name, tokens in pool.cache_tokens.items())
        lines.append(f"  KV cache of each server: {room}")
        lines += [f"  host memory for what is offloaded: {pool.host / GB:.1f} GB"] if pool.host else []
        lines.append(f"  {pool.verdict}")
    return lines


def _table(header: list[str] | None, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, indented by two spaces; columns are as wide as their widest cell."""
    cells = ([header] if header else []) + list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
