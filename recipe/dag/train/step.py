"""The training half of a step: rows in, updated policies out.

Invariant: a node starts only after its dependencies have finished; policies of one pool train in turn, policies of
different pools at the same time. All forward passes over the old weights precede the first update of any policy,
because the workflow's dependencies say so.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

import numpy as np
import torch

from recipe.dag.algorithms.estimate import credit_batch, estimate
from recipe.dag.algorithms.mappo import Mappo
from recipe.dag.core.errors import UserError
from recipe.dag.core.tensors import as_tensor
from recipe.dag.credit.agent_share import equal_weights, lessons, loss_shares, weighted
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.report.progress import TrainingPasses
from recipe.dag.train import kernels
from recipe.dag.train.alternation import actor_updates_at
from recipe.dag.train.centralized_critic import JointHistory
from recipe.dag.train.critics import CriticBatch, critic_batches, value_metrics
from recipe.dag.train.given_rows import given_rows
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.metrics import call_advantages, record_tokens, token_metrics
from recipe.dag.train.paired_updates import update_in_steps
from recipe.dag.train.role_baselines import Averages, RoleBaselines
from recipe.dag.train.schedule import run_nodes
from recipe.dag.train.selection import select_rows
from recipe.dag.train.sequential import CompoundFactor, in_sequence
from recipe.dag.train.team_critic import Credits, TeamCritic, credited
from recipe.dag.train.throughput import ModelFlops, memory_metrics, throughput_metrics
from recipe.dag.train.weights import weigh_importance, weigh_uncertainty
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row
from recipe.dag.workflow.node import CRITIC_KINDS, KINDS, Kind, Node
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.training_chain import is_derived

DOMINANT = 0.9
"""Share of a policy's loss above which its other agents hardly learn."""


class TrainingStep:
    """Runs the training nodes of one step; `step` counts from 0.

    Policies and critics without rows in this step stay unchanged, and so do actors whose turn it is not. `episodes` are
    those that the rows come from, for credit that reads messages: a row's call is
    `episodes[uid, episode].all_calls[call.position]`. `mixing` is the learner of the team's value, which vdn and
    qmix need together with the episodes; `baselines` are the moving averages of an estimator that has them. `flops`
    holds the policies whose utilization is measured; `passes` displays the passes while they run."""

    def __init__(
        self,
        workflow: Workflow,
        policies: dict[str, PolicyRuntime],
        rows: list[Row],
        *,
        episodes: Sequence[Episode] = (),
        mixing: TeamCritic | None = None,
        baselines: RoleBaselines | None = None,
        flops: Mapping[str, ModelFlops] | None = None,
        passes: TrainingPasses | None = None,
        step: int = 0,
        seed: int,
    ):
        self.flops, self.passes = flops or {}, passes or TrainingPasses(enabled=False)
        self.workflow, self.policies, self.step, self.seed = workflow, policies, step, seed
        self.episodes = {(episode.uid, episode.index): episode for episode in episodes}
        self.mixing, self.baselines = mixing, baselines
        if workflow.algorithm.given_text is not None:
            (name,) = {agent.policy for agent in workflow.agents} & set(workflow.trained_policies())
            own, endpoint = [row for row in rows if row.policy == name], policies[name].endpoint
            assert endpoint is not None  # policies are started before the first step
            rows = [*rows, *given_rows(own, episodes, workflow.algorithm, endpoint)]
        trained_rows, self.context_rows = select_rows(rows, workflow)
        self.batches = {name: PolicyBatch(policy_rows) for name, policy_rows in trained_rows.items() if policy_rows}
        self.reader: JointHistory | None = None
        if workflow.algorithm.joint_critic:
            self.reader = JointHistory(
                self.episodes,
                tokenizer_of=lambda owner: policies[owner].tokenizer,
                limit_of=lambda owner: _max_model_len(policies[owner]),
                max_chars=cast("Mappo", workflow.algorithm).history_chars,  # mappo alone has a joint critic
            )
        self.critics = critic_batches(workflow, self.batches, self.reader)
        for name in self._trained_against_the_servers() & self.batches.keys():
            batch = self.batches[name]
            batch.columns["old_log_probs"] = [as_tensor(row.rollout_log_probs, np.float32) for row in batch.rows]
        self.timing: dict[str, float] = {}
        self.preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock per policy, because its nodes share one batch that the first of them builds."""
        self.factor: CompoundFactor | None = None

    def _trained_against_the_servers(self) -> set[str]:
        """Return the policies whose importance ratios are taken against the servers' log-probs.

        They have no node that recomputes the log-probs. With `old_log_probs: auto` a derived chain omits that node
        because all ratios are 1, so its policies are not among these."""
        updates = self.workflow.of_kind(Kind.UPDATE)
        auto = self.workflow.algorithm.old_log_probs == "auto"
        recomputed = {self._policy_of(node) for node in self.workflow.of_kind(Kind.OLD_LOG_PROBS)}
        all_ratios_one = {self._policy_of(node) for node in updates if auto and is_derived(node.id)}
        return {self._policy_of(node) for node in updates} - recomputed - all_ratios_one

    async def run(self) -> None:
        nodes = [node for node in self.workflow.training_nodes if self._has_work(node)]
        if self.workflow.algorithm.happo is not None:
            nodes, order = in_sequence(self.workflow, nodes, self._policy_of, seed=self.seed, step=self.step)
            self.factor = CompoundFactor(self.workflow.algorithm, order)
        await run_nodes(nodes, self._execute)

    def _policy_of(self, node: Node) -> str:
        # a node for all policies (a joint advantage) goes by the first agent's
        return node.policy or self.workflow.agents[0].policy

    def _has_work(self, node: Node) -> bool:
        name, algorithm = self._policy_of(node), self.workflow.algorithm
        if node.kind is Kind.ADVANTAGE and algorithm.spans_policies:
            return bool(self.batches)
        if node.kind in CRITIC_KINDS:
            return self.workflow.critic_owner(name) in self.critics
        # log-probs serve the update, and the advantages too if they depend on the reference
        advantages = node.kind is Kind.ADVANTAGE or node.kind is not Kind.UPDATE and algorithm.credit_reads_log_probs
        return name in self.batches and (advantages or actor_updates_at(self.workflow, name, self.step))

    def _batch_owner(self, node: Node) -> str:
        """Return the policy whose batch the node works on: for a critic node, the policy that owns the critic."""
        policy = self._policy_of(node)
        if node.kind not in CRITIC_KINDS:
            return policy
        owner = self.workflow.critic_owner(policy)
        assert owner is not None  # _has_work drops critic nodes of policies without a critic
        return owner

    async def _execute(self, node: Node) -> None:
        name, kernel = self._batch_owner(node), self._kernel(node)
        if node.kind is Kind.ADVANTAGE:  # on the driver; only an encoder needs a policy's devices
            async with (self.mixing and self.mixing.lock) or nullcontext():
                await self._timed(node, kernel, name)
            return
        prepare = self._critic if node.kind in CRITIC_KINDS else self._actor
        async with self.preparing[name]:  # the driver builds the tensors, so other policies may use the pool meanwhile
            await asyncio.to_thread(prepare, name)
        async with self.policies[name].pool.turn(self.policies[name].processes):
            await self._timed(node, kernel, name)

    async def _timed(self, node: Node, kernel: Callable[[str], None], name: str) -> None:
        started = time.monotonic()
        owners = self.batches if node.policy is None else (name,)  # a joint advantage is for all policies
        label = f"{KINDS[node.kind].step} of {', '.join(owners)}"
        with self.passes.show(f"step {self.step + 1}: {label}", self._tokens(node, name), kind=label):
            await asyncio.to_thread(kernel, name)
        self.timing[node.id] = time.monotonic() - started

    def _tokens(self, node: Node, name: str) -> int | None:
        """Return the number of tokens that a worker reads for the node; None if the driver does the work."""
        if node.kind is Kind.ADVANTAGE:
            return None
        batch = self.critics[name].batch if node.kind in CRITIC_KINDS else self.batches[name]
        return sum(len(row.prompt_ids) + len(row.response_ids) for row in batch.rows)

    def _kernel(self, node: Node) -> Callable[[str], None]:
        kernels = {
            Kind.ADVANTAGE: self._joint_advantage if self.workflow.algorithm.spans_policies else self._advantage,
            Kind.REFERENCE: self._reference,
            Kind.OLD_LOG_PROBS: self._old_log_probs,
            Kind.UPDATE: self._update,
            Kind.VALUES: self._values,
            Kind.CRITIC_UPDATE: self._update_critic,
        }
        return kernels[node.kind]

    def _actor(self, name: str) -> tuple[PolicyRuntime, PolicyBatch]:
        policy, batch = self.policies[name], self.batches[name]
        if batch.data is None:
            kernels.prepare(policy, batch, self.workflow.algorithm)
        return policy, batch

    def _critic(self, name: str) -> tuple[PolicyRuntime, CriticBatch]:
        policy, critic = self.policies[name], self.critics[name]
        if critic.batch.data is None:
            kernels.prepare_critic(policy, critic.batch, critic.spec)
        return policy, critic

    def _old_log_probs(self, name: str) -> None:
        policy, batch = self._actor(name)
        kernels.old_log_probs(policy, batch)
        if self.workflow.algorithm.importance is not None:
            weigh_importance(batch, self.workflow.algorithm.importance)

    def _reference(self, name: str) -> None:
        kernels.reference_log_probs(*self._actor(name))

    def _values(self, owner: str) -> None:
        if "values" not in self.critics[owner].batch.columns:  # policies that share a critic may each have a node
            policy, critic = self._critic(owner)
            kernels.values(policy, critic.batch)
            critic.split_to_policies("values")

    def _advantage(self, name: str) -> None:
        batch, context, averages = self.batches[name], self._context_of(name), {}
        if self.baselines is not None:
            averages = self.baselines.take(name, [*batch.rows, *context])
            batch.metrics |= {f"baseline/{role}": value for role, value in averages.items()}
        self._credit([name], context, baselines=averages)

    def _context_of(self, name: str) -> list[Row]:
        return [row.without_tokens() for row in self.context_rows if row.policy == name]

    def _joint_advantage(self, name: str) -> None:
        if self.workflow.algorithm.team_value is not None:
            self._mixed_advantage()
        else:
            self._credit(list(self.batches), self.context_rows)

    def _mixed_advantage(self) -> None:
        """Divide the team's return among the calls, then compare calls as grpo does."""
        assert self.mixing is not None  # the trainer opens one for estimators with a team value
        keys = {(row.uid, row.episode) for batch in self.batches.values() for row in batch.rows}
        keys |= {(row.uid, row.episode) for row in self.context_rows}
        episodes = [episode for key, episode in self.episodes.items() if key in keys]
        call_credits = self.mixing.learn(episodes, seed=self.seed)
        for name in self.batches:
            self._credit([name], [], call_credits)

    def _credit(
        self, names: list[str], context: list[Row], credit: Credits | None = None, baselines: Averages | None = None
    ) -> None:
        """Compute advantages and returns of the policies' rows. `context` are rows that are not trained on, but whose
        rewards take part; `credit` replaces the calls' own rewards; `baselines` are by role."""
        algorithm, batches = self.workflow.algorithm, [self.batches[name] for name in names]
        rows = [row for batch in batches for row in batch.rows] + context
        mixed = None
        if credit is not None:
            rows, mixed = zip(*(credited(row, credit[row.uid, row.episode]) for row in rows), strict=True)
        columns = self._columns(names, rows_without=len(context))
        more = {"mixer_credits": mixed, "baselines": baselines, "base": self.workflow.path}
        results = estimate(algorithm, rows, **columns, **more)
        if algorithm.pairs_calls:
            batches[0].metrics |= algorithm.credit_metrics(credit_batch(algorithm, rows, **columns))
        for column, tensors in zip(("advantages", "returns"), results, strict=True):
            start = 0
            for batch in batches:
                batch.columns[column] = list(tensors[start : start + len(batch.rows)])
                start += len(batch.rows)
        if algorithm.uncertainty is not None:
            for batch in batches:
                weigh_uncertainty(batch, algorithm.uncertainty)
        for batch in batches:
            if algorithm.agent_weights == "equal":
                batch.agent_weights = equal_weights(batch.rows, algorithm.loss_agg)
                by_row = [batch.agent_weights] * len(batch.rows)
                batch.columns["advantages"] = weighted(batch.rows, batch.columns["advantages"], by_row)
            self._record_advantages(batch)

    def _columns(self, names: list[str], *, rows_without: int) -> dict[str, list[torch.Tensor | None]]:
        """Return the tensors that the credit of the policies' rows reads, by the arguments of `estimate`, with None for
        the `rows_without` rows behind them."""
        algorithm, columns = self.workflow.algorithm, {}
        if algorithm.needs_values or self._has_values(names):
            columns["values"] = [value for name in names for value in self._values_of(name)]
        if algorithm.pairs_calls:
            columns["log_ratios"] = [ratio for name in names for ratio in self._log_ratios(name)]
        if algorithm.kl_reward_coef:
            weight = -algorithm.kl_reward_coef
            columns["penalties"] = [weight * ratio for name in names for ratio in self._log_ratios(name)]
        return {key: [*tensors, *[None] * rows_without] for key, tensors in columns.items()}

    def _values_of(self, name: str) -> list[torch.Tensor]:
        """Return the values of the policy's rows. Raises UserError if no critic has computed them."""
        columns = self.batches[name].columns
        if "values" not in columns:
            raise UserError(
                f"estimator {self.workflow.algorithm.estimator} needs a critic: policies.{name} has none, or no CRITIC "
                "node computes its values before the advantages"
            )
        return columns["values"]

    def _has_values(self, names: list[str]) -> bool:
        """Return whether the estimator may read values and critics have valued the rows of all these policies."""
        valued = all("values" in self.batches[name].columns for name in names)
        return self.workflow.algorithm.may_read_values and valued

    def _record_advantages(self, batch: PolicyBatch) -> None:
        """Write each call's mean advantage into its episode's record."""
        for (uid, index, position), mean in call_advantages(batch.rows, batch.columns["advantages"]).items():
            if (episode := self.episodes.get((uid, index))) is not None:
                episode.all_calls[position].advantage = mean

    def record_tokens(self, episodes: Iterable[Episode]) -> None:
        """Write the numbers of each call's tokens into the records of these episodes."""
        chosen = {(episode.uid, episode.index): episode for episode in episodes}
        for batch in self.batches.values():
            record_tokens(batch.rows, batch.columns, chosen)

    def _log_ratios(self, name: str) -> list[torch.Tensor]:
        """Return each token's log-prob under the policy minus that under its reference, one tensor per row."""
        columns, algorithm = self.batches[name].columns, self.workflow.algorithm
        if not {"ref_log_prob", "old_log_probs"} <= columns.keys():
            what = "estimator" if algorithm.pairs_calls else "kl_reward_coef"
            raise UserError(
                f"algorithm.{what}: policies.{name} needs `reference: true`, and its log-prob nodes must come before "
                "the advantages"
            )
        return [
            old - reference for old, reference in zip(columns["old_log_probs"], columns["ref_log_prob"], strict=True)
        ]

    def _update_critic(self, owner: str) -> None:
        if self.critics[owner].updated:
            return
        policy, critic = self._critic(owner)
        critic.concat("returns")
        kernels.update_critic(policy, critic.batch, critic.spec, seed=self.seed)
        critic.updated = True

    def _update(self, name: str) -> None:
        policy, batch = self._actor(name)
        if self.factor is not None:
            self.factor.weigh(batch)
        algorithm = self.workflow.algorithm
        if algorithm.pairs_calls and algorithm.epochs * algorithm.mini_batches > 1:
            update_in_steps(policy, batch, algorithm, partial(self._recredit, name), seed=self.seed)
        else:
            kernels.update_actor(policy, batch, algorithm, seed=self.seed)
        if self.factor is not None and name != self.factor.last:
            self.factor.follow(batch, kernels.log_probs(policy, batch))

    def _recredit(self, name: str, rows: Sequence[Row], log_ratios: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the advantages of some of the policy's rows, with all of their samples, for these log-ratios."""
        context = self._context_of(name)
        ratios = [*log_ratios, *[None] * len(context)]
        advantages, _ = estimate(self.workflow.algorithm, [*rows, *context], log_ratios=ratios)
        return advantages[: len(rows)]

    def loss_shares(self, name: str) -> dict[str, float]:
        """Return the share of each agent in the loss of the policy."""
        batch = self.batches[name]
        return loss_shares(batch.rows, self.workflow.algorithm.loss_agg, batch.agent_weights)

    def dominant_agents(self) -> dict[str, tuple[str, float]]:
        """Return policy -> its agent with more than DOMINANT of the loss, and the share, of policies with several."""
        shares = {name: self.loss_shares(name) for name in self.batches}
        largest = {name: max(of.items(), key=lambda item: item[1]) for name, of in shares.items() if len(of) > 1}
        return {name: (agent, share) for name, (agent, share) in largest.items() if share > DOMINANT}

    def metrics(self) -> dict[str, float]:
        metrics = {f"timing/{node_id}": seconds for node_id, seconds in self.timing.items()}
        metrics["train/rows"] = float(sum(row.learns for batch in self.batches.values() for row in batch.rows))
        for name, batch in self.batches.items():
            values = batch.metrics | token_metrics(batch.rows, batch.columns)
            metrics |= {f"agent/{agent}/grad_tokens_share": share for agent, share in self.loss_shares(name).items()}
            if "advantages" in batch.columns:
                taught = lessons(batch.rows, batch.columns["advantages"], self.workflow.algorithm.loss_agg)
                for agent, own in taught.items():
                    metrics |= {f"agent/{agent}/{key}": value for key, value in own.items()}
            memory = {key: values.pop(key) for key in list(values) if key.startswith("perf/")}
            if "values" in batch.columns:
                values |= value_metrics(batch)
            values |= self._reference_metrics(name)
            metrics |= {f"policy/{name}/{key}": value for key, value in values.items()}
            perf = throughput_metrics(batch.passes, self.flops.get(name)) | memory_metrics(memory)
            metrics |= {f"perf/{name}/{key}": value for key, value in perf.items()}
        for kind, count in (("computed", "total_tokens"), ("trained", "trained_tokens")):
            if self.batches:
                metrics[f"rows/tokens_{kind}"] = sum(metrics[f"policy/{name}/{count}"] for name in self.batches)
        for owner, critic in self.critics.items():
            perf = throughput_metrics(critic.batch.passes, None)
            metrics |= {f"perf/{owner}/{key}": value for key, value in perf.items()}
            metrics |= {f"policy/{owner}/critic/{key}": value for key, value in critic.batch.metrics.items()}
            if self.reader is not None and self.reader.rows:
                metrics[f"policy/{owner}/critic/history_shortened"] = self.reader.shortened / self.reader.rows
        return metrics | (self.mixing.metrics if self.mixing is not None and self.batches else {})

    def _reference_metrics(self, name: str) -> dict[str, float]:
        """Return how old a reference is that is renewed, in steps, and the share of the policy's calls in a pair."""
        reference, metrics = self.workflow.policies[name].reference, {}
        if reference is not None and reference.refresh is not None:
            metrics["reference_age"] = float(self.step % reference.refresh)
        if self.workflow.algorithm.pairs_calls:
            paired = sum(len(row.calls) for row in self.batches[name].rows if not row.given)
            others = sum(len(row.calls) for row in self.context_rows if row.policy == name)
            metrics["spin/paired_share"] = paired / (paired + others)
        return metrics


def _max_model_len(policy: PolicyRuntime) -> int:
    assert policy.endpoint is not None  # policies are started before the first step
    return policy.endpoint.max_model_len
