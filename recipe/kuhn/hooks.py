"""A player of Kuhn poker: reads what the env shows and answers with one word."""

from __future__ import annotations

from recipe.dag import Agent, Context, Message


class Player(Agent):
    """Its whole prompt is the env's observation, so that an information set has one prompt."""

    def prompt(self, context: Context) -> list[Message]:
        return messages(context.obs)


def messages(observation: str) -> list[Message]:
    return [{"role": "user", "content": observation}]
