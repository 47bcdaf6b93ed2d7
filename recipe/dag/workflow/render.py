"""A plan as text for a terminal, as a Mermaid flowchart, or as JSON.

Invariant: equal plans give equal text, so the output can be compared and committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipe.dag.algorithms import ENTRIES
from recipe.dag.workflow.plan import Plan, PlannedAgent, PlannedNode, PlannedPolicy
from recipe.dag.workflow.training_chain import is_derived

COLOURS = ("#cfe2ff", "#d1e7dd", "#fff3cd", "#f8d7da", "#e2d9f3", "#cff4fc", "#ffe5d0", "#d3d3d3")
_STEPS = {"ADVANTAGE": "advantage", "REFERENCE": "reference log-probs"}


def to_json(plan: Plan) -> str:
    return plan.model_dump_json(indent=2)


def to_text(plan: Plan) -> str:
    lines = [f"{plan.dag_id} ({plan.file})"]
    lines += [" ".join(plan.description.split())] if plan.description.strip() else []
    header = ["group", "name", "policy", "nodes", "sampling", "tools"]
    lines += ["", "Agents", *_table(header, map(_agent_row, plan.agents))]
    header = ["name", "model", "weights", "agents", "GPUs"]
    lines += ["", "Policies", *_table(header, map(_policy_row, plan.policies))]
    turns = f"up to {plan.max_turns} turns" if plan.max_turns > 1 else "1 turn"
    lines += ["", f"Rollout ({turns} per episode; nodes of one line run in parallel)", *_numbered(plan, plan.rollout)]
    lines += ["", "Scoring", *(_numbered(plan, plan.scoring) or ["  the env's rewards"])]
    lines += ["", f"Training ({'derived' if plan.training_derived else 'declared'}; {_credit(plan)})"]
    lines += _numbered(plan, plan.training) or ["  none: every policy is frozen"]
    lines += ["", "Generated tokens per episode, at most (prompts and tool results come on top)"]
    budget = [(f"agent {agent.name}", agent.max_generated_tokens, _product(plan, agent)) for agent in plan.agents]
    budget += [(f"policy {policy.name}", policy.max_generated_tokens, "") for policy in plan.policies]
    budget += [("total", plan.max_generated_tokens, "")]
    lines += _table(None, [[name, f"{tokens:,}", how] for name, tokens, how in budget])
    return "\n".join(line.rstrip() for line in lines)


def to_mermaid(plan: Plan) -> str:
    """A flowchart as GitHub draws it: solid edges carry data, dotted ones only order the policies' updates."""
    # Declared ids may be Mermaid keywords ("end"), so nodes get ids of their own.
    ids = {node.node_id: f"n{index}" for index, node in enumerate(plan.nodes)}
    colour = {policy.name: f"p{index}" for index, policy in enumerate(plan.policies)}
    training = {name for level in plan.training for name in level}

    def box(node: PlannedNode) -> str:
        shape = f'["{_label(node)}"]' if node.policy else f'{{{{"{_label(node)}"}}}}'
        return f"{ids[node.node_id]}{shape}" + (f":::{colour[node.policy]}" if node.policy else "")

    lines = ["flowchart TD"]
    lines += [f"  {box(node)}" for node in plan.nodes if node.node_id not in training]
    for policy in plan.policies:
        mine = [node for node in plan.nodes if node.node_id in training and node.policy == policy.name]
        if mine:
            lines.append(f'  subgraph train_{colour[policy.name]}["training of policy {policy.name}"]')
            lines += [f"    {box(node)}" for node in mine] + ["  end"]
    for node in plan.nodes:
        for dependency in node.dependencies:
            crosses = {dependency, node.node_id} <= training and plan.node(dependency).policy != node.policy
            lines.append(f"  {ids[dependency]} {'-.->' if crosses else '-->'} {ids[node.node_id]}")
    for index, policy in enumerate(plan.policies):
        style = "stroke:#333,color:#111" + ("" if policy.trained else ",stroke-dasharray:4 3")
        lines.append(f"  classDef {colour[policy.name]} fill:{COLOURS[index % len(COLOURS)]},{style}")
    return "\n".join(lines)


def _label(node: PlannedNode) -> str:
    second = node.agent or _step_name(node)
    return f"{node.node_id}<br/>{second}" + (f" ({node.policy})" if node.agent else "")


def _step_name(node: PlannedNode) -> str:
    if node.node_role == "ACTOR":
        return "old log-probs" if node.only_forward_compute else "update"
    return _STEPS.get(node.node_role, node.node_role.lower())


def _agent_row(agent: PlannedAgent) -> list[str]:
    sampling = agent.sampling
    parts = [f"temperature {sampling.temperature:g}", f"max_tokens {sampling.max_tokens}"]
    parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"top_k {sampling.top_k}"] if sampling.top_k > 0 else []
    parts += [f"repetition_penalty {sampling.repetition_penalty:g}"] if sampling.repetition_penalty != 1 else []
    parts += ["ignore_eos"] if sampling.ignore_eos else []
    loop = agent.tool_loop
    how = f" ({loop.format} loop, up to {loop.max_generations} generations)" if loop else " (called by its hook)"
    tools = ", ".join(agent.tools) + how if agent.tools else "-"
    return [str(agent.agent_group), agent.name, agent.policy, ", ".join(agent.nodes), ", ".join(parts), tools]


def _policy_row(policy: PlannedPolicy) -> list[str]:
    weights = ("trained" if policy.trained else "frozen") + (", reference kept" if policy.reference else "")
    shared = " (shared)" if len(policy.agents) > 1 else ""
    return [policy.name, policy.path, weights, ", ".join(policy.agents) + shared, str(policy.gpus or "shared")]


def _numbered(plan: Plan, levels: Sequence[Sequence[str]]) -> list[str]:
    rows = [" | ".join(_shown(plan.node(name)) for name in level) for level in levels]
    return [f"  {number}. {row}" for number, row in enumerate(rows, 1)]


def _shown(node: PlannedNode) -> str:
    if is_derived(node.node_id):
        return node.node_id
    parts = [node.agent or (_step_name(node) if node.policy else node.runs or "")]
    parts += [node.runs] if node.agent and node.runs else []
    parts += [f"after {', '.join(node.dependencies)}"] if node.agent and node.dependencies else []
    return f"{node.node_id} [{', '.join(part for part in parts if part)}]"


def _credit(plan: Plan) -> str:
    grouped = "group_by" in ENTRIES[plan.estimator].options
    groups = f", groups by {', '.join(plan.group_by)}" if grouped else ""
    return f"estimator {plan.estimator}{groups}"


def _product(plan: Plan, agent: PlannedAgent) -> str:
    generations = agent.tool_loop.max_generations if agent.tool_loop else 1
    factors = [(len(agent.nodes), "node"), (plan.max_turns, "turn"), (generations, "generation")]
    counted = " x ".join(f"{count} {noun}{'s' if count != 1 else ''}" for count, noun in factors)
    return f"{counted} x {agent.sampling.max_tokens} tokens"


def _table(header: list[str] | None, rows: Sequence[list[str]] | map) -> list[str]:
    table = ([header] if header else []) + list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
