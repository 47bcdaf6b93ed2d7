"""Workflows of the games that come in sizes: relay_2 to relay_5 by symbols, additive_2 to additive_8 by players.

    python examples/games/sized.py relay_3 [--output workflow.yaml]

`additive_N` gives all players the team's reward; `additive_vdn_N` lets a VDN mixer divide it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight")
RIGHT = "abbabaab"
"""Each player's right action."""
RELAY = """\
dag_id: relay_{size}
description: A number goes through a message of one letter; {size} numbers, {size} letters, a policy per player.
agents:
  - {{name: speaker, policy: speaker, sampling: {{max_tokens: 2}}}}
  - {{name: guesser, policy: guesser, sampling: {{max_tokens: 2}}}}
policies:
  speaker: {{model: {{path: "${{oc.env:MODEL_PATH}}"}}}}
  guesser: {{model: {{path: "${{oc.env:MODEL_PATH}}"}}}}
algorithm: {{estimator: grpo}}
nodes:
  - id: speak
    agent: speaker
    hooks: examples/games/hooks.py:Speaker
    prompt_options: {{actions: {size}}}
  - id: guess
    agent: guesser
    after: speak
    hooks: examples/games/hooks.py:Guesser
    prompt_options: {{actions: {size}}}
  - {{id: guessed, reward: examples/games/hooks.py:guessed, args: {{symbols: {size}}}, after: guess}}
"""
ADDITIVE = """\
dag_id: {name}
description: {size} players who choose at the same time, each with a right action of its own; one policy, told its role.
agents:
{agents}
policies:
  main: {{model: {{path: "${{oc.env:MODEL_PATH}}"}}}}
algorithm: {{estimator: {estimator}}}
x-plays: &plays {{hooks: examples/games/hooks.py:Player, prompt_options: {{role: true}}}}
nodes:
{nodes}
  - {{id: team, reward: examples/games/hooks.py:additive, args: {{right: {right}}}, after: [{names}]}}
"""


def workflow_of(game: str) -> str:
    """The YAML text. Raises ValueError for a game that is none of them."""
    found = re.fullmatch(r"(relay|additive|additive_vdn)_(\d)", game)
    if not found or not 2 <= int(found[2]) <= (5 if found[1] == "relay" else len(NAMES)):
        raise ValueError(f"{game}: is none of relay_2 to relay_5, additive_2 to additive_8, additive_vdn_2 to _8")
    size = int(found[2])
    if found[1] == "relay":
        return RELAY.format(size=size)
    names = NAMES[:size]
    return ADDITIVE.format(
        name=game,
        size=size,
        estimator="vdn" if found[1] == "additive_vdn" else "grpo",
        agents="\n".join(f"  - {{name: {name}, policy: main, sampling: {{max_tokens: 2}}}}" for name in names),
        nodes="\n".join(f"  - {{<<: *plays, id: {name}, agent: {name}}}" for name in names),
        names=", ".join(names),
        right=RIGHT[:size],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("game")
    parser.add_argument("--output", type=Path, help="the file; on stdout without it")
    options = parser.parse_args(argv)
    try:
        text = workflow_of(options.game)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output is None:
        print(text, end="")
    else:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
