"""Generate small tables to classify or estimate, for runs that need neither a download nor a GPU.

Invariant: the target depends on some columns and not on others, and the answers are in no file that agents get. The
same seed gives the same tasks, and no training task has the text or a table of a test task.

`python recipe/dsbench/tabular.py --local_dir data/tabular --train_size 512 --test_size 64 --seed 0`

A row's `extra_info` has `files` (train.csv and test.csv, as text), `answer_csv` (the text of the answers' file), and
`metadata` and `data_type` as in the published tasks (recipe/dsbench/prepare.py).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.problems import row_of

TRAIN_ROWS, TEST_ROWS = 60, 40
NOISE = 0.12
"""Standard deviation of the noise, of that of the target without noise."""
EMPTY = 0.02
"""Share of empty cells in columns of numbers."""
PLACES = (
    "Accra", "Bergen", "Cusco", "Dakar", "Essen", "Fez", "Ghent", "Hanoi", "Izmir", "Jaipur", "Kobe", "Lima",
    "Malmo", "Nairobi", "Oslo", "Porto", "Quito", "Riga", "Sofia", "Turin", "Utrecht", "Varna", "Wroclaw", "York",
)  # fmt: skip
METRICS = {
    "rmse": "Root Mean Squared Error (RMSE)",
    "mae": "Mean Absolute Error (MAE)",
    "accuracy": "accuracy of the labels",
    "roc_auc": "area under the ROC curve (AUC) of the probability of the last label in alphabetical order",
}
_MAX_MISSES = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column of test.csv: numbers from `low` to `high`, or one of `values`."""

    name: str
    low: float = 0.0
    high: float = 1.0
    values: tuple[str, ...] = ()

    def draw(self, rng: random.Random) -> float | str:
        return rng.choice(self.values) if self.values else round(rng.uniform(self.low, self.high), 1)

    def effect(self, cell: float | str) -> float:
        """Return the cell on a scale from -1 to 1."""
        if isinstance(cell, str):
            return 2 * self.values.index(cell) / (len(self.values) - 1) - 1
        return 2 * (cell - self.low) / (self.high - self.low) - 1


@dataclass(frozen=True, slots=True)
class Domain:
    """Tables about one kind of thing, which is also the name of the id column."""

    thing: str
    target: str
    relevant: tuple[Column, ...]
    irrelevant: tuple[Column, ...]
    peaked: bool = False
    """The target falls with the distance from the middle of the relevant columns; otherwise it is a weighted sum."""
    labels: tuple[str, ...] = ()
    """In ascending order of the quantity that the columns determine; empty: the target is that quantity."""
    low: float = 0.0
    high: float = 1.0
    """The range of a target that is a number."""

    @property
    def data_type(self) -> str:
        return "classification" if self.labels else "regression"

    @property
    def metrics(self) -> tuple[str, ...]:
        if not self.labels:
            return "rmse", "mae"
        return ("accuracy", "roc_auc") if len(self.labels) == 2 else ("accuracy",)


def _numbers(**ranges: tuple[float, float]) -> tuple[Column, ...]:
    return tuple(Column(name, low, high) for name, (low, high) in ranges.items())


DOMAINS = (
    Domain(
        "flat",
        "rent",
        (*_numbers(size=(20, 140), rooms=(1, 6)), Column("heating", values=("none", "coal", "gas"))),
        (*_numbers(door=(1, 99), ticket=(0, 50)), Column("colour", values=("white", "green", "grey"))),
        low=300,
        high=2500,
    ),
    Domain(
        "car",
        "price",
        (*_numbers(power=(40, 300), seats=(2, 8)), Column("gearbox", values=("manual", "automatic"))),
        (*_numbers(plate=(100, 999), lane=(1, 12)), Column("paint", values=("red", "blue", "black"))),
        low=2000,
        high=60000,
    ),
    Domain(
        "field",
        "harvest",
        _numbers(rain=(200, 900), heat=(5, 35), lime=(0, 9)),
        (*_numbers(parcel=(1, 80), fence=(10, 200)), Column("owner", values=("coop", "state", "family"))),
        peaked=True,
        low=1,
        high=12,
    ),
    Domain(
        "hive",
        "honey",
        _numbers(bloom=(1, 60), wind=(0, 40), damp=(20, 90)),
        (*_numbers(shelf=(1, 30), nails=(4, 60)), Column("roof", values=("tin", "wood", "tile"))),
        peaked=True,
        low=2,
        high=40,
    ),
    Domain(
        "loan",
        "repaid",
        (*_numbers(income=(10, 90), savings=(0, 50)), Column("work", values=("casual", "term", "permanent"))),
        (*_numbers(desk=(1, 40), form=(100, 900)), Column("branch", values=("north", "south", "west"))),
        labels=("no", "yes"),
    ),
    Domain(
        "letter",
        "spam",
        _numbers(links=(0, 30), capitals=(0, 80), offers=(0, 9)),
        (*_numbers(minute=(0, 59), server=(1, 16)), Column("font", values=("serif", "sans", "mono"))),
        labels=("ham", "spam"),
    ),
    Domain(
        "battery",
        "lasts",
        _numbers(volts=(2, 5), warmth=(0, 60), load=(1, 20)),
        (*_numbers(crate=(1, 70), aisle=(1, 25)), Column("label", values=("long", "short", "round"))),
        peaked=True,
        labels=("no", "yes"),
    ),
    Domain(
        "patient",
        "health",
        _numbers(sugar=(40, 200), pulse=(40, 140), weight=(40, 140)),
        (*_numbers(ward=(1, 20), bed=(1, 90)), Column("shift", values=("early", "late", "night"))),
        peaked=True,
        labels=("ill", "well"),
    ),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `train`, `test` and `answer` are CSV."""

    text: str
    domain: Domain
    columns: tuple[Column, ...]
    """In the order of the tables."""
    metric: str
    train: str
    test: str
    answer: str


def generate(seed: int, n: int, exclude: Sequence[Task] = ()) -> list[Task]:
    """Return `n` tasks with distinct texts, equally many of each domain, none with the text of a task in `exclude`.
    Raises UserError if too few exist."""
    rng = random.Random(seed)
    texts = {data_script.text_key(task.text) for task in exclude}
    tasks: list[Task] = []
    misses = 0
    while len(tasks) < n:
        task = draw(DOMAINS[len(tasks) % len(DOMAINS)], rng)
        if data_script.text_key(task.text) in texts:
            misses += 1
            if misses > _MAX_MISSES:
                raise UserError(f"found only {len(tasks)} of {n} distinct tasks; ask for fewer")
            continue
        texts.add(data_script.text_key(task.text))
        tasks.append(task)
    rng.shuffle(tasks)
    return tasks


def draw(domain: Domain, rng: random.Random) -> Task:
    """Return a task with the relevant columns of its domain and two others, in random order."""
    columns = [*domain.relevant, *rng.sample(domain.irrelevant, 2)]
    rng.shuffle(columns)
    metric, location = rng.choice(domain.metrics), rng.choice(PLACES)
    rows = _rows(domain, columns, rng)
    train, test = rows[:TRAIN_ROWS], rows[TRAIN_ROWS:]
    names = [column.name for column in columns]
    id_and_target = [domain.thing, domain.target]
    return Task(
        _text(domain, columns, metric, location),
        domain,
        tuple(columns),
        metric,
        _csv([domain.thing, *names, domain.target], train),
        _csv([domain.thing, *names], [row[:-1] for row in test]),
        _csv(id_and_target, [[row[0], row[-1]] for row in test]),
    )


def splits(seed: int, train_size: int, test_size: int) -> tuple[list[Task], list[Task]]:
    """Return (train, test) as the script writes them; seeds do not share random streams."""
    test = generate(2 * seed, test_size)
    return generate(2 * seed + 1, train_size, exclude=test), test


def row(task: Task, index: int, split: str, files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a row in verl's schema. files: name -> content of further ones for the agents."""
    metadata = {
        "task_id": f"tabular-{split}-{index}",
        "task_type": "data_modeling",
        "data_type": task.domain.data_type,
        "metric": task.metric,
        "id_column": task.domain.thing,
        "target_column": task.domain.target,
    }
    tables = {"train.csv": {"content": task.train}, "test.csv": {"content": task.test}}
    extra = {
        "files": tables | {name: {"content": text} for name, text in (files or {}).items()},
        "answer_csv": task.answer,
        "metadata": json.dumps(metadata),
        "data_type": task.domain.data_type,
    }
    return row_of("tabular", task.text, "", index, split, **extra) | {"ability": "data_modeling"}


def check_disjoint(train: Sequence[Task], test: Sequence[Task]) -> None:
    """Raise RuntimeError if a training task has the text or a table of a test task."""
    for what in ("text", "train", "test", "answer"):
        shared = {getattr(task, what) for task in train} & {getattr(task, what) for task in test}
        if shared:
            raise RuntimeError(f"{len(shared)} training tasks have the {what} of a test task")


def _text(domain: Domain, columns: Sequence[Column], metric: str, location: str) -> str:
    kinds = (f"{column.name} ({'text' if column.values else 'number'})" for column in columns)
    target = f"one of {', '.join(domain.labels)}" if domain.labels else "a number"
    return (
        f"Predict {domain.target} ({target}) of each {domain.thing} in {location}.\n"
        f"Columns: {', '.join(kinds)}.\n"
        f"Evaluation: {METRICS[metric]}.\n"
        f"Submission: {domain.thing},{domain.target}"
    )


def _rows(domain: Domain, columns: Sequence[Column], rng: random.Random) -> list[list[Any]]:
    """Return [id, cells in the order of `columns`, target] of all rows."""
    count = TRAIN_ROWS + TEST_ROWS
    weights = {column.name: rng.uniform(0.7, 1.3) for column in domain.relevant}
    cells = [{column.name: column.draw(rng) for column in columns} for _ in range(count)]
    values = [_quantity(domain, weights, row) for row in cells]
    spread = pstdev(values)
    values = [value + rng.gauss(0, NOISE * spread) for value in values]
    targets = _labelled(values, domain.labels) if domain.labels else _scaled(values, domain.low, domain.high)
    ids = rng.sample(range(1000, 10_000), count)
    rows = []
    for number, row, target in zip(ids, cells, targets, strict=True):
        printed = ["" if not c.values and rng.random() < EMPTY else row[c.name] for c in columns]
        rows.append([number, *printed, target])
    return rows


def _quantity(domain: Domain, weights: dict[str, float], row: dict[str, float | str]) -> float:
    effects = [(weights[column.name], column.effect(row[column.name])) for column in domain.relevant]
    if domain.peaked:
        return -sum(weight * effect**2 for weight, effect in effects)
    return sum(weight * effect for weight, effect in effects)


def _labelled(values: list[float], labels: tuple[str, ...]) -> Iterator[str]:
    """Cut the values into classes of equal size."""
    ordered = sorted(values)
    cuts = [ordered[len(values) * index // len(labels)] for index in range(1, len(labels))]
    return (labels[sum(value >= cut for cut in cuts)] for value in values)


def _scaled(values: list[float], low: float, high: float) -> Iterator[float]:
    center, spread = fmean(values), 4 * pstdev(values)
    return (round((low + high) / 2 + (high - low) * (value - center) / spread, 3) for value in values)


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--local_dir", required=True, type=data_script.folder, help="where train.parquet and test.parquet go"
    )
    parser.add_argument("--train_size", type=int, default=512)
    parser.add_argument("--test_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, action="append", default=[], help="a further file for the agents")
    options = parser.parse_args(argv)
    data_script.check_numbers(options)
    try:
        files = {path.name: path.read_text("utf-8") for path in options.file}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file: {error}; pass a text file") from error
    train, test = splits(options.seed, options.train_size, options.test_size)
    check_disjoint(train, test)
    data_script.write(
        options.local_dir,
        {
            split: [row(task, index, split, files) for index, task in enumerate(tasks)]
            for split, tasks in (("train", train), ("test", test))
        },
    )


if __name__ == "__main__":
    sys.exit(data_script.run(main))
