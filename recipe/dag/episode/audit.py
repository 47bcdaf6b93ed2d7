"""Plays texts that need no skill through a workflow, and adds up their rewards: `verl-dag audit`.

Invariant: episodes are played and scored as in training, with the attack in place of every trained agent's answers. No
model is asked: an agent whose policy is not trained, such as a judge behind a server, gives the lowest verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.attacks import ATTACKS, LABEL, UNASKED, Attack, label, variants
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.listed_tools import with_stand_ins
from recipe.dag.episode.make_tools import make_tools
from recipe.dag.episode.rehearsal import END, MAX_TOKENS, CharacterTokenizer, strict, tool_request, with_all_tokens
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.markup import python_blocks
from recipe.dag.types.record import Episode, Generation
from recipe.dag.types.tool import Tool, close_tool
from recipe.dag.workflow.schema import Workflow

Part = tuple[str, str]
"""An agent, and the node that pays it."""


@dataclass(frozen=True, slots=True)
class Paid:
    """The earnings of one attack, in the form that earns most."""

    attack: str
    text: str
    """The attack on the first sample."""
    parts: Mapping[Part, tuple[float, float]]
    """The mean over the samples, and the share of samples with more than 0; no entry if nothing was scored."""
    agents: Mapping[str, float]
    """The mean of all parts; 0.0 for an episode in which the agents only win from each other."""


@dataclass(frozen=True, slots=True)
class Audit:
    rows: Sequence[Paid]
    """The label itself, then the attacks."""
    silent: Sequence[str]
    """The agents that were not asked."""
    samples: int

    @property
    def parts(self) -> list[Part]:
        return list(dict.fromkeys(part for row in self.rows for part in row.parts))

    def worth(self, agent: str) -> float:
        """Return what an agent's attacks are compared with: what the label earns it, or 1 if that is nothing."""
        earned = self.rows[0].agents.get(agent, 0.0)
        return earned if earned > 0.0 else 1.0

    def share(self, row: Paid) -> tuple[float, str]:
        """Return the largest share of an agent's `worth` that an attack earns, and the agent."""
        return max(((paid / self.worth(agent), agent) for agent, paid in row.agents.items()), default=(0.0, ""))

    def above(self, bound: float) -> list[tuple[Paid, float, str]]:
        """Return the attacks that earn an agent more than this share, the largest first."""
        found = [(row, *self.share(row)) for row in self.rows[1:]]
        return sorted((entry for entry in found if entry[1] > bound), key=lambda entry: -entry[1])


async def audit(
    workflow: Workflow,
    samples: Sequence[dict[str, Any]],
    attacks: Mapping[str, Attack] = ATTACKS,
    *,
    sandbox: SandboxClient | None = None,
) -> Audit:
    """Play every attack on every sample. `sandbox`: for workflows that use one. Raises UserError for an error of the
    workflow's code, which an attack may provoke."""
    workflow = with_stand_ins(with_all_tokens(strict(workflow)))
    tools = make_tools(workflow, sandbox, online=False)
    attacker = _Attacker(workflow, tools)
    endpoints = dict.fromkeys(workflow.policies, PolicyEndpoint(attacker, attacker.tokenizer, MAX_TOKENS))
    runner = EpisodeRunner(workflow, endpoints, tools, seed=0, sandbox=sandbox)
    try:
        rows = [await _played(runner, attacker, samples, LABEL, label)]
        worth = Audit(rows, (), 0)
        for name, attack in attacks.items():
            rows.append(await _played(runner, attacker, samples, name, attack, worth))
    finally:
        for tool in tools.values():
            await close_tool(tool)
    return Audit(rows, [agent.name for agent in workflow.agents if agent.name in attacker.silent], len(samples))


async def _played(
    runner: EpisodeRunner,
    attacker: _Attacker,
    samples: Sequence[dict[str, Any]],
    name: str,
    attack: Attack,
    worth: Audit | None = None,
) -> Paid:
    forms: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for sample in samples:
        for form, text in enumerate(variants(name, attack, sample)):
            uid = str(len(attacker.texts))
            attacker.texts[uid] = text
            forms[form].append((sample, uid))
    best = Paid(name, "", {}, {})
    for group in forms.values():
        try:
            episodes = await run_batch(runner, group, 2 if runner.scores_groups else 1, step=0, max_in_flight=64)
        except UserError as error:
            raise UserError(f"{error} (the attack: {name})") from error
        paid = _paid(name, attacker.texts[group[0][1]], episodes)
        # the label's forms earn different agents their reward; an attack has one form at a time
        best = paid if not best.agents else _union(best, paid) if worth is None else max(best, paid, key=worth.share)
    return best


def _union(first: Paid, second: Paid) -> Paid:
    """Return the most that each agent earns in one of two forms."""
    larger = {agent: max(first.agents.get(agent, paid), paid) for agent, paid in second.agents.items()}
    parts = {part: max(first.parts.get(part, paid), paid) for part, paid in second.parts.items()}
    return Paid(first.attack, first.text, {**first.parts, **parts}, {**first.agents, **larger})


def _paid(attack: str, text: str, episodes: Sequence[Episode]) -> Paid:
    parts: dict[Part, list[float]] = defaultdict(list)
    agents: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        scored = [call for call in episode.calls if call.reward is not None]
        by_part: dict[Part, float] = defaultdict(float)
        by_agent: dict[str, float] = defaultdict(float)
        for call in scored:
            by_agent[call.agent] += call.reward or 0.0
            for node, reward in call.reward_parts.items():
                by_part[call.agent, node] += reward
        won = sum(by_agent.values()) > 0.0
        for agent, reward in by_agent.items():
            agents[agent].append(reward if won else min(reward, 0.0))
        for part, reward in by_part.items():
            parts[part].append(reward)
    shares = {part: (fmean(own), fmean(paid > 0.0 for paid in own)) for part, own in parts.items()}
    return Paid(attack, text, shares, {agent: fmean(own) for agent, own in agents.items()})


class _Attacker:
    """A GenerationClient that writes an episode's text for every agent of a trained policy."""

    repeats = True

    def __init__(self, workflow: Workflow, tools: Mapping[str, Tool]) -> None:
        self.tokenizer = CharacterTokenizer()
        self.texts: dict[str, str] = {}
        """By uid."""
        trained = set(workflow.trained_policies())
        self.silent = {agent.name for agent in workflow.agents if agent.policy not in trained}
        self._loops = {
            agent.name: (agent, tools[agent.tools[0].key]) for agent in workflow.agents if agent.tool_loop is not None
        }
        self._asked: set[str] = set()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        uid, _, agent = request_id.split("-", 2)
        text = UNASKED if agent in self.silent else self.texts[uid]
        if agent in self._loops and (programs := python_blocks(text)):
            text = text.rpartition("```")[2]
            if request_id not in self._asked:
                self._asked.add(request_id)
                text = tool_request(*self._loops[agent], programs[-1])
        ids = self.tokenizer.encode(text + END)
        return Generation(ids, [-1.0] * len(ids), "stop")
