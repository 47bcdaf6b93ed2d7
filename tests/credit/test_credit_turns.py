"""Advantages of every estimator for agents that move once, in two turns, or in a loop that each episode ends by itself,
and the table of them in docs/credit.md."""

from __future__ import annotations

from itertools import product
from math import fsum
from pathlib import Path
from statistics import fmean

import pytest
import torch

from recipe.dag.algorithms.catalogue import SELECTABLE, make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.credit.batch import CreditBatch
from tests.credit.with_defaults import zero_variance

PAGE = Path(__file__).parents[2] / "docs" / "credit.md"
EPISODES = 4
SHAPES = {
    "one call": [[(0, 0)]] * EPISODES,
    "two turns": [[(0, 0), (1, 0)]] * EPISODES,
    "three turns": [[(0, 0), (1, 0), (2, 0)]] * EPISODES,
    "loop": [[(0, r) for r in range(rounds)] for rounds in (1, 2, 3, 2)],
    "turns that stop early": [[(t, 0) for t in range(turns)] for turns in (3, 1, 2, 1)],
}
"""The (turn, round) of each of the agent's calls, by episode."""
IRREGULAR = ("loop", "turns that stop early")
"""Those that no fault passes which the others catch."""
OUTCOMES = {"all solved": (1.0,) * EPISODES, "all failed": (0.0,) * EPISODES, "half": (1.0, 0.0, 0.0, 1.0)}
WITHOUT_BASELINE = {"reinforce"}
"""Its advantage is the return."""


def algorithm_of(name, **options):
    options |= {"pairs": "all"} if name == "spin" else {}  # by default it leaves out episodes that earned the same
    return make_algorithm(estimator=name, **options)


def rows_of(make_row, shape, rewards_of):
    """One row per call; `rewards_of`: per episode the rewards of its calls. All are forks of the first."""
    rows = []
    for episode, (steps, rewards) in enumerate(zip(shape, rewards_of, strict=True)):
        for position, ((turn, round_), reward) in enumerate(zip(steps, rewards, strict=True)):
            recorded = {"position": position, "round": round_, "step": turn + round_, "parts": {"grade": reward}}
            rows.append(make_row(reward, episode=episode, trunk=0, turn=turn, mask=(1,), **recorded))
    return rows


def paid_at_the_end(shape, outcomes):
    return [[0.0] * (len(steps) - 1) + [outcome] for steps, outcome in zip(shape, outcomes, strict=True)]


def advantages(algorithm, rows, expected=0.0):
    """Return the advantage of each row's only token; critics value every token at `expected`."""
    values = [torch.full((1,), expected) for _ in rows] if algorithm.needs_values else None
    found, _ = estimate(algorithm, rows, values=values)
    return [tokens.item() for tokens in found]


def team_returns(shape, rewards_of):
    """Return the team's returns from each call's turn on, which vdn and qmix get in place of its own rewards."""
    return [
        [fsum(r for (turn, _), r in zip(steps, rewards, strict=True) if turn >= own) for own, _ in steps]
        for steps, rewards in zip(shape, rewards_of, strict=True)
    ]


def credited(make_row, name, shape, rewards_of):
    """(the rows, their advantages); critics have learned the mean outcome."""
    paid = team_returns(shape, rewards_of) if name in ("vdn", "qmix") else rewards_of
    rows = rows_of(make_row, shape, paid)
    return rows, advantages(algorithm_of(name), rows, fmean(map(fsum, rewards_of)))


@pytest.mark.parametrize("shape", IRREGULAR)
@pytest.mark.parametrize("outcome", ["all solved", "all failed"])
@pytest.mark.parametrize("name", SELECTABLE)
def test_episodes_that_all_earned_the_same_give_no_gradient(make_row, name, outcome, shape):
    if name in WITHOUT_BASELINE and outcome == "all solved":
        pytest.skip("it has no baseline: every token gets the return")
    if name == "magrpo" and outcome == "all solved":
        pytest.skip("its discount pays a solution for being early; see the next test")
    steps = SHAPES[shape]
    _, found = credited(make_row, name, steps, paid_at_the_end(steps, OUTCOMES[outcome]))
    assert found == [0.0] * len(found)


@pytest.mark.parametrize("shape", IRREGULAR)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_solved_and_failed_groups_are_not_informative(make_row, outcome, shape):
    """Dynamic sampling counts informative groups (DAPO)."""
    steps = SHAPES[shape]
    batch = CreditBatch.from_rows(rows_of(make_row, steps, paid_at_the_end(steps, OUTCOMES[outcome])))
    assert set(zero_variance(batch)) == {outcome != "half"}


@pytest.mark.parametrize("shape", IRREGULAR)
def test_magrpo_without_its_discount_gives_no_gradient_either(make_row, shape):
    steps = SHAPES[shape]
    rows = rows_of(make_row, steps, paid_at_the_end(steps, OUTCOMES["all solved"]))
    found = advantages(algorithm_of("magrpo", gamma_turn=1.0), rows)
    assert found == [0.0] * len(found)


@pytest.mark.parametrize("shape", IRREGULAR)
@pytest.mark.parametrize("name", [name for name in SELECTABLE if name not in WITHOUT_BASELINE])
def test_every_call_of_a_solved_episode_is_above_and_of_a_failed_one_below(make_row, name, shape):
    steps, outcomes = SHAPES[shape], OUTCOMES["half"]
    rows, found = credited(make_row, name, steps, paid_at_the_end(steps, outcomes))
    last_alone = {
        "turns that stop early": {(name, 2) for name in ("magrpo", "counterfactual", "spin", "vdn", "qmix")},
        "loop": {("magrpo", 2), ("counterfactual", 2)},
    }
    for row, advantage in zip(rows, found, strict=True):
        if (name, row.calls[0].step) in last_alone.get(shape, ()):
            continue  # these compare calls of one turn or round, and only one or two episodes came so far
        assert advantage > 0 if outcomes[row.episode] else advantage <= 0


@pytest.mark.parametrize("name", [name for name in SELECTABLE if name not in WITHOUT_BASELINE | {"vdn", "qmix"}])
def test_a_revision_that_helps_is_paid_more_than_one_that_does_not(make_row, name):
    """Episodes 0 and 1 ask for a second turn; it helps the first. Both calls of it are paid more than both of the
    other, and more than a wrong answer at once."""
    steps = [[(0, 0), (1, 0)], [(0, 0), (1, 0)], [(0, 0)], [(0, 0)]]
    _, found = credited(make_row, name, steps, paid_at_the_end(steps, (1.0, 0.0, 1.0, 0.0)))
    asked, answered, asked_in_vain, answered_wrongly, right, wrong = found
    assert asked > asked_in_vain and answered > answered_wrongly and asked > wrong
    assert min(asked, right) > 0 > max(asked_in_vain, wrong)


def stopping_game(algorithm, make_row, solved, bonus):
    """The expected push towards talking on: two actions at each of three turns, stop or talk, equally likely; episodes
    end when they stop. Whether one is solved is independent of it, with probability `solved`; talking on pays `bonus`
    at once and costs it at the end. The sum over all groups of three episodes of probability times advantage times the
    score of the decision, +0.5 for talk and -0.5 for stop, over the calls' mean, is the gradient; it is 0 in truth."""
    lengths, push = (1, 2, 3), 0.0
    chance = {1: 0.5, 2: 0.25, 3: 0.25}
    outcomes = {1.0: solved, 0.0: 1.0 - solved}
    for group in product(product(lengths, outcomes), repeat=3):
        probability = 1.0
        for length, outcome in group:
            probability *= chance[length] * outcomes[outcome]
        shape = [[(turn, 0) for turn in range(length)] for length, _ in group]
        rewards = [[bonus] * (length - 1) + [outcome - bonus * (length - 1)] for length, outcome in group]
        paid = team_returns(shape, rewards) if algorithm.team_value else rewards
        rows = rows_of(make_row, shape, paid)
        for row, advantage in zip(rows, advantages(algorithm, rows), strict=True):
            if row.calls[0].turn < 2:  # the last turn leaves no choice
                talks = row.calls[0].turn + 1 < group[row.episode][0]
                push += probability * advantage * (0.5 if talks else -0.5)
    return push


FREE = {"whiten": False}
ODDS = [(0.2, 0.4), (0.5, 0.0), (0.9, 0.4)]
"""Columns of the page's table: how probable a solution is, and what talking on pays at once."""
GAME_OPTIONS = {"magrpo": {"gamma_turn": 1.0}, "ippo": {"lam": 1.0}, "mappo": {"lam": 1.0}}


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "grpo", "group_by": ("uid", "agent", "turn", "round")},
        {"estimator": "grpo", "gamma_turn": 1.0, "group_by": ("uid", "agent", "turn", "round")},
        {"estimator": "gae", **FREE},
        {"estimator": "gae_chain", **FREE},
        {"estimator": "ippo", "lam": 1.0, **FREE},
        {"estimator": "mappo", "lam": 1.0, **FREE},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_nothing_is_gained_by_talking_for_its_own_sake(make_row, options):
    """Enumerates all groups."""
    pushes = [stopping_game(make_algorithm(**options), make_row, *odds) for odds in ODDS]
    assert pushes == pytest.approx([0.0] * len(ODDS), abs=1e-6)


@pytest.mark.parametrize("name", SELECTABLE)
def test_the_page_states_what_is_gained_by_talking_for_its_own_sake(make_row, name):
    pushes = [stopping_game(algorithm_of(name, **GAME_OPTIONS.get(name, {})), make_row, *odds) for odds in ODDS]
    cells = ["0" if abs(push) < 1e-6 else f"{push:+.2f}" for push in pushes]
    assert f"| `{name}` | {' | '.join(cells)} |" in PAGE.read_text()


def test_own_rewards_alone_do_prefer_talking_where_it_pays_at_once(make_row):
    """Calls that get their own reward only are the failure that the game must detect."""
    options = {"estimator": "grpo", "gamma_turn": 0.0}
    assert stopping_game(make_algorithm(**options), make_row, 0.5, 0.4) > 0.1


def test_two_steps_are_learned_that_only_their_end_pays(make_row):
    """Two turns of two actions each, rewarded at the end if both are right. The default learns the first as well."""
    torch.manual_seed(0)
    logits = torch.full((2, 2), 0.0)
    algorithm = make_algorithm()
    for step in range(60):
        actions = torch.stack([torch.multinomial(p, 64, replacement=True) for p in logits.softmax(1)], dim=1)
        shape = [[(0, 0), (1, 0)]] * 8
        for begin in range(0, 64, 8):
            group = actions[begin : begin + 8].tolist()
            rows = rows_of(make_row, shape, [[0.0, float(a == b == 1)] for a, b in group])
            for row, advantage in zip(rows, advantages(algorithm, rows), strict=True):
                turn = row.calls[0].turn
                score = -logits[turn].softmax(0)
                score[group[row.episode][turn]] += 1
                logits[turn] += 0.02 * advantage * score
        assert step == 0 or logits.isfinite().all()
    assert logits.softmax(1)[:, 1].min() > 0.9


def table(make_row):
    """Mean advantage of the first calls and of the last ones, of solved and of failed episodes."""
    header = ["estimator", *(f"{shape}, {outcome}" for shape in TABLE_SHAPES for outcome in TABLE_OUTCOMES)]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name in SELECTABLE:
        cells = [_cell(make_row, name, SHAPES[s], OUTCOMES[o]) for s in TABLE_SHAPES for o in TABLE_OUTCOMES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLE_SHAPES, TABLE_OUTCOMES = ("one call", "two turns", "loop"), ("all solved", "all failed", "half")


def _cell(make_row, name, shape, outcomes):
    """`first / last` advantage of a solved episode, then of a failed one; one number where all are equal."""
    rows, found = credited(make_row, name, shape, paid_at_the_end(shape, outcomes))
    parts = []
    for outcome in sorted(set(outcomes), reverse=True):
        index = outcomes.index(outcome)
        of_episode = [a for row, a in zip(rows, found, strict=True) if row.episode == index]
        ends = dict.fromkeys(f"{a:+.2f}" if round(a, 2) else "0" for a in (of_episode[0], of_episode[-1]))
        parts.append(" / ".join(ends))
    return "; ".join(parts)


def test_the_page_shows_the_table(make_row):
    """To renew it, put what this prints on a failure between the marks."""
    text = PAGE.read_text()
    shown = text.partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0]
    assert shown == table(make_row), table(make_row)
