"""The plan of a workflow as data: the order of nodes, the training of policies, and the most tokens generated.

Invariant: a plan is a function of the workflow alone; it reads no environment variable and no model. Only `memory` and
`gpus`, which are set on request, depend on the machine.
"""

from __future__ import annotations

from pathlib import Path

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.core.counted import counted
from recipe.dag.core.frozen import Frozen
from recipe.dag.workflow.agent_schema import Agent, Sampling, ToolLoop
from recipe.dag.workflow.condition import in_words
from recipe.dag.workflow.graph import graph_of, levels, with_whole_loops
from recipe.dag.workflow.memory import PolicyMemory, PoolMemory
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.training_chain import is_derived


class PlannedAgent(Frozen):
    name: str
    agent_group: int
    policy: str
    sampling: Sampling
    tools: tuple[str, ...]
    tool_loop: ToolLoop | None
    memory: str
    nodes: tuple[str, ...]
    moves: int
    """Maximum number of calls per turn; nodes in a loop count once per round."""
    max_generated_tokens: int
    """Maximum per episode: moves x turns x generations per call x max_tokens."""


class PlannedPolicy(Frozen):
    name: str
    path: str
    """The model as written in the file, including `${oc.env:NAME}`."""
    trained: bool
    snapshot: str | None
    """The policy whose past self this one is, and how often it changes."""
    reference: bool
    refresh: int | None
    """Number of steps after which the reference is renewed."""
    critic: str | None
    """The policy whose critic is used: itself, or the one whose critic it shares."""
    lr: float | None
    train_cycle: int | None
    gpus: int | None
    behind_api: bool
    agents: tuple[str, ...]
    max_generated_tokens: int
    """Maximum per episode, over all its agents."""


class PlannedNode(Frozen):
    id: str
    kind: str
    after: tuple[str, ...]
    agent: str | None
    """The agent of a rollout node."""
    policy: str | None
    """The policy of a rollout or training node; None if the node serves all policies."""
    runs: str | None
    """The user's hook or function, with its file."""
    when: str | None
    """The condition on which it runs, in words."""
    envs: tuple[str, ...]
    """The envs that it may step."""
    of_group: bool = False
    """A reward node that scores all episodes of a sample at once."""
    candidates: str | None = None
    """How many candidates it has, and which one is kept, in words."""


class PlannedLoop(Frozen):
    name: str
    nodes: tuple[str, ...]
    max_rounds: int
    until: str | None
    """The condition that ends the loop early, in words."""


class Plan(Frozen):
    file: str
    dag_id: str
    description: str
    estimator: str
    group_by: tuple[str, ...]
    gamma_turn: float | None
    """Discount factor per call, within groups or in the team's value; None without a discount."""
    uncertainty: float | None
    """Strength of the weighting by uncertainty (`uncertainty.alpha`); None without it."""
    policy_loss: str
    clip: tuple[float, float]
    """Distance below and above 1 at which importance ratios are clipped."""
    outside_loss: tuple[str, ...]
    """Penalties on length and calls excluded from the loss, in words."""
    importance: str | None
    """Correction of the loss for the server's log-probs, in words; None without a correction."""
    happo_order: str | None
    """Order of sequential updates (HAPPO); None if policies are updated independently."""
    happo_factor: str | None
    """Factor by which an update scales the advantages of later ones, in words."""
    exchange: tuple[str, ...]
    """Agents that exchange their policies (CORY)."""
    exchange_every: int | None
    """Steps between two exchanges."""
    max_batches: int
    """Maximum number of batches that a step may roll out; more than 1 with dynamic sampling."""
    max_turns: int
    agents: tuple[PlannedAgent, ...]
    policies: tuple[PlannedPolicy, ...]
    nodes: tuple[PlannedNode, ...]
    loops: tuple[PlannedLoop, ...]
    rollout: tuple[tuple[str, ...], ...]
    """Node ids by level; the nodes of one level run at the same time."""
    scoring: tuple[tuple[str, ...], ...]
    training: tuple[tuple[str, ...], ...]
    training_derived: bool
    max_generated_tokens: int
    """Maximum per episode, without prompts, whose length depends on the data."""
    max_forks: int
    """Maximum number of times that a part of a training episode is played again (`counterfactual`)."""
    memory: tuple[PolicyMemory, ...] = ()
    gpus: tuple[PoolMemory, ...] = ()
    sharing: tuple[str, ...] = ()
    """Which policies should share GPUs by what a run has measured, in words."""
    choices: tuple[str, ...] = ()
    """Settings that were chosen to fit the machine, in words."""
    no_gpus: str | None = None
    """The reason why `gpus` is empty although it was requested."""

    def node(self, node_id: str) -> PlannedNode:
        """Return the node with this id. Raises StopIteration if it does not exist."""
        return next(node for node in self.nodes if node.id == node_id)


def make_plan(workflow: Workflow) -> Plan:
    """Return the plan of a workflow, without the parts that depend on the machine."""
    agents = tuple(_agent(workflow, index, agent) for index, agent in enumerate(workflow.agents))
    training, loops = workflow.training_nodes, [loop.nodes for loop in workflow.loops.values()]
    return Plan(
        file=Path(workflow.path).name,
        dag_id=workflow.dag_id,
        description=workflow.description,
        estimator=workflow.algorithm.estimator,
        group_by=workflow.algorithm.grouping,
        gamma_turn=workflow.algorithm.discount_per_turn,
        uncertainty=workflow.algorithm.uncertainty and workflow.algorithm.uncertainty.alpha,
        policy_loss=workflow.algorithm.policy_loss,
        clip=(workflow.algorithm.clip_ratio_low, workflow.algorithm.clip_ratio_high),
        outside_loss=_outside_loss(workflow.algorithm),
        importance=_importance(workflow.algorithm),
        happo_order=workflow.algorithm.happo and workflow.algorithm.happo.order,
        happo_factor=_happo_factor(workflow.algorithm),
        exchange=workflow.algorithm.cory.roles if workflow.algorithm.cory else (),
        exchange_every=workflow.algorithm.cory and workflow.algorithm.cory.every,
        max_batches=workflow.algorithm.dynamic_sampling.max_batches if workflow.algorithm.dynamic_sampling else 1,
        max_turns=workflow.episode.max_turns,
        agents=agents,
        policies=tuple(_policy(workflow, name, agents) for name in workflow.policies),
        nodes=tuple(_node(workflow, node) for node in workflow.nodes),
        loops=tuple(
            PlannedLoop(
                name=name, nodes=loop.nodes, max_rounds=loop.max_rounds, until=loop.until and in_words(loop.until)
            )
            for name, loop in workflow.loops.items()
        ),
        rollout=levels(with_whole_loops(graph_of(workflow.episode_nodes), loops)),
        scoring=levels(graph_of(workflow.reward_nodes)),
        training=levels(graph_of(training)),
        training_derived=any(is_derived(node.id) for node in training),
        max_generated_tokens=sum(agent.max_generated_tokens for agent in agents),
        max_forks=max_forks(workflow),
    )


def max_forks(workflow: Workflow) -> int:
    """Return the most forks of a training episode."""
    forks, trained = workflow.algorithm.forks, workflow.trained_policies()
    moves = sum(_moves(workflow, _nodes(workflow, agent)) for agent in workflow.agents if agent.policy in trained)
    return forks.most(moves * workflow.episode.max_turns) if forks is not None else 0


def _outside_loss(algorithm: Algorithm) -> tuple[str, ...]:
    overlong = algorithm.overlong
    mask = ("without calls that were cut off",) if overlong and overlong.mask else ()
    void = ("without agents of void turns",) if algorithm.drop_void_turns else ()
    penalty = overlong.penalty if overlong else None
    costs = (f"the last {counted(penalty.buffer, 'token')} cost up to {penalty.weight:g}",) if penalty else ()
    return (*mask, *void, *costs)


def _importance(algorithm: Algorithm) -> str | None:
    if algorithm.importance is None:
        return None
    options = algorithm.importance
    unit = {"token": "token", "sequence": "call", "geometric": "call (geometric mean)"}[options.level]
    how = {"truncate": "truncated", "mask": "masked"}[options.mode]
    veto = f", veto below {options.veto:g}" if options.veto is not None else ""
    return f"importance ratios per {unit} {how} at {options.cap:g}{veto}"


def _happo_factor(algorithm: Algorithm) -> str | None:
    if algorithm.happo is None:
        return None
    bound = f" at {algorithm.happo.bound:g}" if algorithm.happo.ratio == "clamped" else ""
    return f"{algorithm.happo.ratio}{bound} per {'turn' if algorithm.advantages_per_turn else 'episode'}"


def _agent(workflow: Workflow, index: int, agent: Agent) -> PlannedAgent:
    nodes = _nodes(workflow, agent)
    moves = _moves(workflow, nodes)
    generations = agent.tool_loop.max_generations if agent.tool_loop else 1
    return PlannedAgent(
        name=agent.name,
        agent_group=index,
        policy=agent.policy,
        sampling=agent.sampling,
        tools=tuple(map(str, agent.tools)),
        tool_loop=agent.tool_loop,
        memory=agent.memory,
        nodes=nodes,
        moves=moves,
        max_generated_tokens=moves * workflow.episode.max_turns * generations * agent.sampling.most_tokens,
    )


def _nodes(workflow: Workflow, agent: Agent) -> tuple[str, ...]:
    return tuple(node.id for node in workflow.rollout_nodes if node.agent == agent.name)


def _moves(workflow: Workflow, nodes: tuple[str, ...]) -> int:
    rounds = {name: loop.max_rounds for loop in workflow.loops.values() for name in loop.nodes}
    return sum(rounds.get(name, 1) * _candidates(workflow, name) for name in nodes)


def _candidates(workflow: Workflow, name: str) -> int:
    """Return how often the node runs in a round, as a node with candidates or as the one that judges them."""
    specs = {node.id: node.candidates for node in workflow.rollout_nodes if node.candidates is not None}
    return max([1, *(spec.k for node, spec in specs.items() if name in (node, spec.by))])


def _policy(workflow: Workflow, name: str, agents: tuple[PlannedAgent, ...]) -> PlannedPolicy:
    policy = workflow.policies[name]
    users = [agent for agent in agents if agent.policy == name]
    every = counted(policy.every or 1, "step")
    return PlannedPolicy(
        name=name,
        path=policy.model.path if policy.api is None else policy.api.title,
        trained=not policy.frozen,
        snapshot=f"{policy.snapshot_of}, every {every}" if policy.snapshot_of is not None else None,
        reference=policy.reference is not None,
        refresh=policy.reference.refresh if policy.reference is not None else None,
        critic=workflow.critic_owner(name),
        lr=policy.lr,
        train_cycle=policy.train_cycle,
        gpus=policy.gpus,
        behind_api=policy.api is not None,
        agents=tuple(agent.name for agent in users),
        max_generated_tokens=sum(agent.max_generated_tokens for agent in users),
    )


def _node(workflow: Workflow, node: Node) -> PlannedNode:
    agent = workflow.agent_of(node) if node in workflow.rollout_nodes else None
    return PlannedNode(
        id=node.id,
        kind=node.kind,
        after=node.after,
        agent=agent.name if agent else None,
        policy=agent.policy if agent else node.policy,
        runs=node.hooks or node.function,
        when=node.when and in_words(node.when),
        envs=node.env,
        of_group=node.scope == "group",
        candidates=node.candidates and f"{node.candidates.keep} of {node.candidates.k} by {node.candidates.by}",
    )
