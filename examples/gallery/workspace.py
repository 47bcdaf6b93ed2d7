"""Agents that hand files over, and a reward for the last file."""

from __future__ import annotations

from verl_dag import Agent, Context, Episode, Message
from verl_dag.envs.workspace_env import fetched_files

TASKS = {
    "cleaner": "The file numbers.csv has one number per line, and lines that are no numbers. Write those that are "
    "numbers to clean.csv.",
    "adder": "The file clean.csv has one number per line. Write their sum to submission.csv.",
}


class Worker(Agent):
    """Writes a program for its part of the task, and sees what the folder had to say so far."""

    def prompt(self, context: Context) -> list[Message]:
        task = f"{TASKS[context.agent]} Answer with one program in a ```python block."
        return [{"role": "user", "content": f"{task}\n\n{context.obs}"}]


def right(episode: Episode) -> dict[str, list[float]]:
    """Return 1 for each call if the submission is the sum, else 0; and 0.1 less for a call without its file."""
    submission = fetched_files(episode).get("submission.csv", "")
    try:
        episode.outcome = float(float(submission) == float(episode.sample["ground_truth"]))
    except ValueError:
        episode.outcome = 0.0
    rewards: dict[str, list[float]] = {}
    for call in episode.calls:
        rewards.setdefault(call.agent, []).append(episode.outcome - 0.1 * (not call.env_info["artifacts_ok"]))
    return rewards
