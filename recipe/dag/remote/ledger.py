"""The consumption of a run's API policies, counted by all of its processes, and the budgets that limit it.

Invariant: counts only grow, and a request is counted before it is sent. A budget is checked in the same transaction, so
that of a budget of calls not one too many is sent, and money and tokens exceed theirs by what is in flight at most.
Answers from a cache are counted apart and cost nothing.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.types.model import Budget, Price

COUNTS = ("calls", "prompt_tokens", "completion_tokens", "cost", "cache_hits", "failed", "opened")
"""calls: requests sent. failed: calls of agents that got no answer. opened: how often the circuit breaker opened."""
BUSY_S = 30.0
"""Longest wait for another process's transaction, of which each takes microseconds."""
_COLUMNS = ", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in COUNTS)


class BudgetError(UserError):
    """A budget is spent, and the workflow says that the run then stops."""


class BudgetFault(ModelServerFault):
    """A budget is spent, and the workflow says that further calls then fail."""

    boundary, infra = "budget", False


class Ledger:
    """Counts by policy. In memory until `share` moves it into a file, which other processes open. Safe for threads."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else str(path)
        self._lock = threading.Lock()
        self._database = _open(self.path)

    def share(self, path: str | Path) -> None:
        """Move the counts into a new file, from which other processes make their Ledger."""
        with self._lock:
            self.path, memory = str(path), self._database
            self._database = _open(self.path)
            memory.backup(self._database)
            memory.close()

    def add(self, policy: str, **amounts: float) -> None:
        with self._lock:
            self._add(policy, amounts)

    def admit(self, policy: str, budget: Budget | None) -> str | None:
        """Count one request and return None, or, if the policy's budget is spent, return the reason and count none."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                spent = None if budget is None else spent_in(budget, self._counts(policy))
                if spent is None:
                    self._add(policy, {"calls": 1})
            finally:
                self._database.execute("COMMIT")
            return spent

    def counts(self, policy: str) -> dict[str, float]:
        with self._lock:
            return self._counts(policy)

    def totals(self) -> dict[str, dict[str, float]]:
        """Return the counts of each policy that has any."""
        with self._lock:
            rows = self._database.execute(f"SELECT policy, {', '.join(COUNTS)} FROM ledger ORDER BY policy")
            return {policy: dict(zip(COUNTS, counts, strict=True)) for policy, *counts in rows}

    def raise_to(self, totals: Mapping[str, Mapping[str, float]]) -> None:
        """Raise the counts to at least these, which the run had when it was interrupted."""
        for policy, counts in totals.items():
            now = self.counts(policy)
            known = {name: counts[name] - now[name] for name in COUNTS if counts.get(name, 0.0) > now[name]}
            self.add(policy, **known)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _add(self, policy: str, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            assert name in COUNTS, name  # it becomes a part of the statement
            self._database.execute(
                f"INSERT INTO ledger (policy, {name}) VALUES (?, ?) "
                f"ON CONFLICT (policy) DO UPDATE SET {name} = {name} + excluded.{name}",
                (policy, amount),
            )

    def _counts(self, policy: str) -> dict[str, float]:
        query = f"SELECT {', '.join(COUNTS)} FROM ledger WHERE policy = ?"
        row = self._database.execute(query, (policy,)).fetchone()
        return dict(zip(COUNTS, row or [0.0] * len(COUNTS), strict=True))


def _open(path: str | None) -> sqlite3.Connection:
    database = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    if path is not None:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")  # the run's own files keep the counts, not this one
    database.execute(f"CREATE TABLE IF NOT EXISTS ledger (policy TEXT PRIMARY KEY, {_COLUMNS})")
    return database


def spent_in(budget: Budget, counts: Mapping[str, float]) -> str | None:
    """Return which limit is reached, in words; None if there is something left."""
    for name, limit, spent in _limits(budget, counts):
        if spent >= limit:
            return f"its budget of {limit:g} {name} is spent ({spent:.6g} {name})"
    return None


def left_of(budget: Budget, counts: Mapping[str, float]) -> float:
    """Return the share of the budget that is left, in [0, 1]: that of the limit of which the least is left."""
    return max(0.0, min(1.0 - spent / limit for _, limit, spent in _limits(budget, counts)))


def _limits(budget: Budget, counts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    spent = {"usd": counts["cost"], "calls": counts["calls"]}
    spent["tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
    limits = budget.model_dump(exclude_none=True)
    return [(name, limit, spent[name]) for name, limit in limits.items()]


@dataclass(frozen=True, slots=True)
class Account:
    """One policy's part of a ledger, with its prices and its budget."""

    policy: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    price: Price | None = None
    budget: Budget | None = None
    stops: bool = True
    """The run ends when the budget is spent."""

    def admit(self, where: str) -> None:
        """Count a request that is about to be sent. Raises BudgetError or BudgetFault if the budget is spent."""
        spent = self.ledger.admit(self.policy, self.budget)
        if spent is not None:
            raise self._refusal(spent, where)

    def check(self, where: str) -> None:
        """Raise BudgetError if nothing is left of the budget and the run would stop at its first call."""
        spent = None if self.budget is None else spent_in(self.budget, self.ledger.counts(self.policy))
        if spent is not None and self.stops:
            raise self._refusal(spent, where)

    def charge(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer and their price."""
        cost = 0.0 if self.price is None else self.price.of(prompt_tokens, completion_tokens)
        self.add(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost)

    def add(self, **amounts: float) -> None:
        self.ledger.add(self.policy, **amounts)

    def _refusal(self, spent: str, where: str) -> Exception:
        if not self.stops:
            return BudgetFault(spent, where=where)
        advice = f"raise policies.{self.policy}.api.budget, and the same command goes on"
        return BudgetError(f"{where}: {spent}; {advice}")
