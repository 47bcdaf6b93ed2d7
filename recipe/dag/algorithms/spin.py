"""Self-play fine-tuning: each policy learns to prefer one answer to a prompt to another, by DPO's loss against a
reference that may follow the policy (SPIN, arXiv 2401.01335; online DPO as in verl's recipe `spin`).

Invariant: a pair answers one prompt, token by token, and each log-prob in its loss belongs to the weights before the
optimizer step that learns from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.base import GroupKey, held
from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.grouped import GROUP_BY, Grouped
from recipe.dag.core.problem import Problem
from recipe.dag.credit.causality import descendants

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch
    from recipe.dag.credit.spin import Pairs

KEYS: tuple[GroupKey, ...] = ("uid", "agent", "node", "turn", "round", "prompt_hash")
PROMPT: tuple[GroupKey, ...] = ("uid", "prompt_hash")
"""DPO's partition function cancels only between answers to one prompt."""
NO_RATIO = "every optimizer step takes log-probs anew, so each ratio is 1 and nothing is clipped; remove this"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "clip_ratio_low": NO_RATIO,
        "clip_ratio_high": NO_RATIO,
        "clip_ratio_c": NO_RATIO,
        "importance": "the weights would multiply the loss of a pair's answers differently; remove this",
        "happo": "a pair is not weighted by what other policies learned; remove this",
        "uncertainty": "the weights would multiply the loss of a pair's answers differently; remove this",
        "agent_weights": "every pair counts the same, whichever agent's it is; remove this",
        "kl_reward_coef": "the loss of a pair contains the reference already; remove this, or use `kl_loss_coef`",
        "tree": "candidates are ranked by their scores alone; remove this",
        "mean_return_between": "groups count by the distance of their returns; write `margin`, or remove this",
    }
)
"""Options that are errors here -> the reason and what to do."""
OF_RANKING = ("pairs", "margin", "stat_unit", "gamma_turn", "dynamic_sampling")
"""Options without an effect where the data's answer is always the better one."""


class Spin(Grouped):
    source: ClassVar[str] = "SPIN, arXiv 2401.01335; online DPO of verl's recipe spin"
    assumes: ClassVar[str] = (
        "every trained policy has a reference; several episodes per sample that share a prompt, candidates, or texts "
        "to imitate"
    )
    pairs_calls: ClassVar[bool] = True

    estimator: Literal["spin"] = "spin"
    group_by: tuple[GroupKey, ...] = KEYS
    beta: float = Field(default=0.1, gt=0.0)
    """Strength of the reference: how far a policy that learns a preference goes from it, inversely."""
    loss: Literal["sigmoid", "hinge", "ipo", "sppo"] = "sigmoid"
    """Loss of a pair, with h = log-ratio of the chosen answer minus that of the rejected one. sigmoid: DPO's, -log
    sigmoid(beta h). hinge: max(0, 1 - beta h). ipo: (h - 1 / (2 beta))^2. sppo: of single answers, the squared distance
    of the log-ratio to (win rate - 1/2) / beta."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """sigmoid: rate at which a preference is taken to be wrong."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """best_worst: the best and the worst answer of each group. all: every two answers of different return, which
    together count as much as one pair."""
    margin: float = Field(default=0.0, ge=0.0)
    """A pair's returns differ by more than this."""
    opponent: Literal["sample", "data"] = "sample"
    """What a sampled answer is compared with. sample: another one, by their returns. data: the sample's own text, which
    is always preferred, as in the paper; rewards do not count."""
    gold: str = "extra_info.answer"
    """opponent data: dotted path of the text in a sample."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the preferred answers, per token, that is added to the loss."""
    drop_zero_variance: Annotated[bool, held("spin", True, "true")] = True
    loss_agg: Annotated[
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"], held("spin", "seq-mean-token-sum")
    ] = "seq-mean-token-sum"
    policy_loss: Annotated[Literal["vanilla", "gspo", "cpgd"], held("spin", "vanilla")] = "vanilla"
    old_log_probs: Annotated[Literal["auto", "trainer", "rollout"], held("spin", "trainer")] = "trainer"

    @property
    def given_text(self) -> str | None:
        return self.gold if self.opponent == "data" else None

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        for key, message in REFUSED.items():
            if facts.has("algorithm", key):
                yield facts.problem(("algorithm", key), message, key=True)
        for key in PROMPT:
            if key not in self.group_by:
                yield facts.problem(GROUP_BY, f"only answers to one prompt can be paired; add `{key}`")
        if self.loss != "sigmoid" and facts.has("algorithm", "label_smoothing"):
            message = f"loss `{self.loss}` does not read this, only `sigmoid` does; remove it"
            yield facts.problem(("algorithm", "label_smoothing"), message, key=True)
        if self.loss == "sppo" and facts.has("algorithm", "pairs"):
            message = "sppo reads the win rate of every answer, not pairs; remove this"
            yield facts.problem(("algorithm", "pairs"), message, key=True)
        yield from self._check_opponent(facts)

    def _check_opponent(self, facts: Facts) -> Iterator[Problem]:
        if self.opponent == "sample":
            if facts.has("algorithm", "gold"):
                message = "only `opponent: data` compares with this text; add that, or remove this"
                yield facts.problem(("algorithm", "gold"), message, key=True)
            return
        for key in OF_RANKING:
            if facts.has("algorithm", key):
                message = "with `opponent: data` the data's text is always the better one; remove this"
                yield facts.problem(("algorithm", key), message, key=True)
        if self.loss == "sppo":
            message = "sppo learns from win rates, and the data's text always wins; choose another loss"
            yield facts.problem(("algorithm", "loss"), message)
        if len(facts.trained_agents) > 1:
            names = ", ".join(agent.name for agent in facts.trained_agents)
            message = f"the data's text answers one agent's prompt, and {names} are trained; use `sample`"
            yield facts.problem(("algorithm", "opponent"), message)

    def check(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check(facts)
        yield from facts.check_forward_passes(("algorithm", "estimator"))

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Warn of updates in which the reference has no effect, and of agents that form no pair."""
        yield from super().warn(facts)
        for name, policy in facts.trained_policies.items():
            refresh = policy.reference.refresh if policy.reference is not None else None
            if refresh == 1 and self.epochs * self.mini_batches == 1:
                message = (
                    "the reference equals the policy in every update, so the loss is constant and `beta` only scales "
                    "the learning rate; refresh less often, or raise `mini_batches` or `epochs`"
                )
                yield facts.problem(("policies", name, "reference"), message, key=True)
        yield from self._warn_of_lone_prompts(facts) if self.opponent == "sample" else ()

    def _warn_of_lone_prompts(self, facts: Facts) -> Iterator[Problem]:
        """Warn of nodes whose prompt always depends on what was sampled before."""
        trained = {agent.name for agent in facts.trained_agents}
        greedy = {agent.name for agent in facts.agents if agent.sampling.temperature == 0}
        moves = {move.id: move.node for move in facts.moves()}
        sampled = [move for move, node in moves.items() if facts.agent_of[node] not in greedy]
        after = descendants(facts.reactions(), sampled)
        first = {node for move, node in moves.items() if not any(move in later for later in after.values())}
        for index, node in enumerate(facts.nodes):
            if facts.agent_of.get(node.id) in trained and not node.candidates and node.id not in first:
                message = (
                    f"`{node.id}` reads what others sampled, so prompts of its episodes differ and it forms no pair; "
                    "add `candidates: {k: 2, by: ...}`"
                )
                yield facts.problem(("nodes", index), message)

    def _pairs(self, batch: CreditBatch) -> Pairs:
        from recipe.dag.credit.returns import call_returns
        from recipe.dag.credit.spin import form_pairs

        if self.opponent == "data":
            worth: list[float | None] = [float(given) for given in batch.given]
            return form_pairs(batch, worth, group_by=self.group_by, pairs="all", margin=0.0)
        returns = call_returns(batch, batch.rewards.tolist(), self.stat_unit, self.gamma_turn)
        worth = [
            candidate.scores[candidate.index] if candidate is not None else None if unscored else own
            for candidate, unscored, own in zip(batch.candidate, batch.unscored, returns, strict=True)
        ]
        return form_pairs(batch, worth, group_by=self.group_by, pairs=self.pairs, margin=self.margin)

    def paired_calls(self, batch: CreditBatch) -> list[bool]:
        calls = set(self._pairs(batch).calls(self.loss))
        return [call in calls for call in range(len(batch.uid))]

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        from recipe.dag.credit.spin import spin

        options = {"loss": self.loss, "beta": self.beta, "label_smoothing": self.label_smoothing}
        advantages = spin(batch, self._pairs(batch), sft_coef=self.sft_coef, **options)
        return batch.broadcast_to_rows(advantages), batch.broadcast_to_rows(batch.rewards)

    def credit_metrics(self, batch: CreditBatch) -> dict[str, float]:
        from recipe.dag.credit.spin import pair_metrics

        options = {"loss": self.loss, "beta": self.beta, "label_smoothing": self.label_smoothing}
        return pair_metrics(batch, self._pairs(batch), **options)
