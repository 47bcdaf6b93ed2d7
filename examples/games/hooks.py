"""Two players of a small game, as agents of a workflow: each says one letter.

Invariant: hooks are stateless. A player is told which one it is only where the workflow says so (`role: true`), and
what another one chose only where its node depends on the other's.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.episode.context import Context, Message, Output
from recipe.dag.episode.record import Episode
from recipe.dag.errors import HookFault

LETTERS = "abc"
GAMES = {
    "anti_coordination": ((0.0, 1.0), (1.0, 0.0)),
    "separating": ((0.0, 2.0), (2.0, -1.0)),
    "climbing": ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0)),
}


class Player:
    def pre_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        obs: Any,
        *,
        context: Context | None = None,
        actions: int = 2,
        role: bool = False,
    ) -> list[Message]:
        if context is None:
            raise HookFault("a player needs the context")
        lines = [f"You are player {context.agent}."] if role else []
        lines += [f"The other player chose {call.text.strip() or 'nothing'}." for call in context.upstream.values()]
        return [{"role": "user", "content": " ".join([*lines, f"Choose {' or '.join(LETTERS[:actions])}."])}]

    def post_process(
        self,
        tokenizer: Any,
        prompt_ids: Any,
        response_ids: list[int],
        *,
        context: Context | None = None,
        actions: int = 2,
    ) -> Output:
        """`action` is None where the answer is none of the letters."""
        said = context.call.text.strip() if context is not None and context.call is not None else ""
        return Output(parsed={"action": LETTERS.index(said) if said in tuple(LETTERS[:actions]) else None})


def payoff(episode: Episode, *, game: str = "anti_coordination") -> dict[str, list[float]]:
    """Both players earn the table's entry; its worst one if either chose nothing."""
    table = GAMES[game]
    row, column = (call.parsed["action"] for call in sorted(episode.calls, key=lambda call: call.agent))
    worst = min(min(line) for line in table)
    earned = worst if row is None or column is None else table[row][column]
    episode.outcome = float(earned == max(max(line) for line in table))
    return {call.agent: [earned] for call in episode.calls}
