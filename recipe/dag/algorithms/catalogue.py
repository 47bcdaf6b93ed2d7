"""The catalogue of algorithms: every estimator and block of `algorithm`, and the reward nodes of the engine.

Invariant: an estimator is listed by its class, a block by its field in `Algorithm`; their classes declare everything
else. Nothing here needs torch, so that the command line and the checks are fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel

from recipe.dag.algorithms.base import Algorithm, is_held, options_of
from recipe.dag.algorithms.blocks import Block
from recipe.dag.algorithms.counterfactual import Counterfactual
from recipe.dag.algorithms.custom import Custom
from recipe.dag.algorithms.gae import Gae, GaeChain
from recipe.dag.algorithms.gdpo import Gdpo
from recipe.dag.algorithms.grpo import Grpo
from recipe.dag.algorithms.ippo import Ippo
from recipe.dag.algorithms.magrpo import Magrpo
from recipe.dag.algorithms.mappo import Mappo
from recipe.dag.algorithms.reinforce import Reinforce, ReinforcePP, ReinforcePPBaseline
from recipe.dag.algorithms.reward_catalogue import REQUIRED, RewardEntry, reward_nodes
from recipe.dag.algorithms.rloo import Rloo
from recipe.dag.algorithms.spin import Spin
from recipe.dag.algorithms.team_value import Qmix, Vdn

DEFAULT = Grpo
"""The class of a workflow without `algorithm.estimator`."""
METHODS: tuple[type[Algorithm], ...] = (
    Grpo,
    Rloo,
    Magrpo,
    Counterfactual,
    Reinforce,
    ReinforcePP,
    ReinforcePPBaseline,
    Gae,
    GaeChain,
    Gdpo,
    Spin,
    Ippo,
    Mappo,
    Vdn,
    Qmix,
)
ESTIMATORS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {method.model_fields["estimator"].default: method for method in METHODS}
)
OWN = "file.py:function"
"""The value of `algorithm.estimator` for an estimator of the user."""
SELECTABLE: tuple[str, ...] = tuple(ESTIMATORS)
BLOCKS: tuple[type[Block], ...] = tuple(
    block
    for field in Algorithm.model_fields.values()
    for block in get_args(field.annotation)
    if isinstance(block, type) and issubclass(block, Block) and block.source
)
"""The blocks that any estimator may have and that have a source."""
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "at_grpo": "write `estimator: grpo, tree: {later: 0}`, and `candidates` where alternatives are sampled",
        "dr_mas": "grpo compares each agent with itself already; write `estimator: grpo`",
        "m_grpo": "no calls are aligned, and grpo compares each agent with itself already; write `estimator: grpo`",
    }
)
"""Former names of estimators, and what to write instead."""
_REWARD_USES = {False: "its code", True: "recipe.dag.reward.credit:shaped, args: {shaping: <name>, players: None, ...}"}
"""Whether a reward is a shaping -> how a workflow selects it."""


def algorithm_class(estimator: Any) -> type[Algorithm] | None:
    """Return the class that the value of `algorithm.estimator` names; None if it names none."""
    if not isinstance(estimator, str):
        return None
    return Custom if ":" in estimator else ESTIMATORS.get(estimator)


def make_algorithm(estimator: str = DEFAULT().estimator, **options: Any) -> Algorithm:
    """Return the algorithm with these options. Raises pydantic's ValidationError, KeyError for an unknown name."""
    return (algorithm_class(estimator) or ESTIMATORS[estimator])(estimator=estimator, **options)


def readers(option: str) -> tuple[str, ...]:
    """Return the estimators that read an option of some estimators; () for an option of all, and for an unknown key."""
    if option in Algorithm.model_fields:
        return ()
    methods = {**ESTIMATORS, OWN: Custom}
    return tuple(name for name, method in methods.items() if option in method.model_fields)


def table() -> str:
    """Return the catalogue as text, one paragraph per use."""
    paragraphs = ["\n".join(["# selected by algorithm.estimator", *_estimators()])]
    paragraphs.append("\n".join(["# switched on by the block algorithm.<name>", *_blocks()]))
    for shaping, use in _REWARD_USES.items():
        lines = [line for entry in reward_nodes() if entry.shaping == shaping for line in _reward(entry)]
        paragraphs.append("\n".join([f"# a node with reward: {use}", *lines]))
    return "\n\n".join(paragraphs)


def _estimators() -> list[str]:
    lines = []
    for name, method in ESTIMATORS.items():
        lines += _paragraph(name, method.source, method.assumes, _options(method), method.__module__)
    return lines + [
        f"{OWN} (your own)",
        "    assumes: a function of a batch and estimator_kwargs; docs/algorithms.md has its arguments and result",
    ]


def _blocks() -> list[str]:
    lines = []
    for block in BLOCKS:
        fields = {key: field.default for key, field in block.model_fields.items() if not field.is_required()}
        must = [f"{key} (required)" for key, field in block.model_fields.items() if field.is_required()]
        options = ", ".join([*must, *(f"{key}={_shown(value)}" for key, value in fields.items())])
        lines += _paragraph(block.__name__.lower(), block.source, block.assumes, options, block.__module__)
    return lines


def _reward(entry: RewardEntry) -> list[str]:
    defaults = {key: option.default for key, option in entry.takes.items()}
    must = [f"{key} (required)" for key, value in defaults.items() if value is REQUIRED]
    free = [f"{key}={_shown(value)}" for key, value in defaults.items() if value is not REQUIRED]
    traits, where = entry.traits, f"recipe.dag.{entry.where}"
    return _paragraph(entry.name, traits.source, traits.assumes, ", ".join([*must, *free]), where)


def _paragraph(name: str, source: str, assumes: str, options: str, where: str) -> list[str]:
    lines = [f"{name} ({source})", f"    assumes: {assumes}"]
    lines += [f"    options: {options}"] if options else []
    return [*lines, f"    code: {where}"]


def _options(method: type[Algorithm]) -> str:
    parts = []
    for key, value in options_of(method).items():
        if isinstance(value, BaseModel):
            inner = {**value.model_dump(), **_encoder(value)}
            parts += [f"{key}.{name}={_shown(default)}" for name, default in inner.items() if name != "encoder"]
        else:
            parts.append(f"{key}={_shown(value)}" + (" (fixed)" if is_held(method, key) else ""))
    return ", ".join(parts)


def _encoder(value: BaseModel) -> dict[str, Any]:
    return {f"encoder.{key}": default for key, default in value.model_dump().get("encoder", {}).items()}


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
