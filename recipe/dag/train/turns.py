"""When a policy's actor learns.

Invariant: a pure function of the workflow and the step, so a resumed run alternates as one that was never stopped.
Steps count from 0. A policy whose turn it is not keeps its weights, its optimizer and its learning-rate schedule.
"""

from __future__ import annotations

from recipe.dag.workflow.schema import Workflow


def actor_learns(workflow: Workflow, policy: str, step: int) -> bool:
    """Not while only critics learn (`critic_warmup`), and in turn with others where `train_cycle` says so."""
    spec = workflow.policies[policy]
    if spec.frozen or step < workflow.algorithm.warmup_steps:
        return False
    if spec.train_cycle is None:
        return True
    in_turn = [name for name in workflow.trained_policies() if workflow.policies[name].train_cycle is not None]
    return (step // spec.train_cycle) % len(in_turn) == in_turn.index(policy)


def actor_updates(workflow: Workflow, policy: str, steps: int) -> int:
    """In how many of a run's steps the actor learns: the length of its learning-rate schedule."""
    return sum(actor_learns(workflow, policy, step) for step in range(steps))
