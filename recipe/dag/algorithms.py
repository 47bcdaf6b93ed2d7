"""The catalogue of algorithms: what each is, where it comes from, what it assumes, and what it reads.

Invariant: data only, imported by the workflow's checks, by credit and by the command line alike, so that a name means
the same to all three. A name may stand under `algorithm.estimator` if and only if its `use` is ESTIMATOR.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from recipe.dag.entry import BLOCK, ESTIMATOR, LIBRARY, REWARD, SHAPING, Entry
from recipe.dag.rewards import REWARDS

WORTH = {"group_by": ("uid", "agent"), "stat_unit": "trajectory", "gamma_turn": None}
GROUP = {**WORTH, "center": "mean", "scale": "std"}
GAE = {"gamma": 1.0, "lam": 1.0, "whiten": True, "critic_warmup": 0}
"""The schema's defaults."""
MIXER = {
    **{"hidden": 64, "lr": 1e-3, "epochs": 4, "batch_size": 64, "steps_per_epoch": 40, "weight_decay": 0.01},
    **{"gamma_turn": 1.0, "lam": 1.0, "target_tau": 0.01, "loss": "squared", "form": "control_variate", "full_at": 0.5},
    **{"replay_steps": 4, "peers": {}},
    "encoder": {"model": None, "chunk": 512},
}
QMIX_ONLY = {"mixing_hidden": 32}


def _estimator(name: str, source: str, assumes: str, where: str, **free: Any) -> Entry:
    return Entry(name, source, assumes, where, ESTIMATOR, MappingProxyType(free), MappingProxyType({}))


def _mixer(name: str, source: str, assumes: str, **inner: Any) -> Entry:
    """Calls of different turns have different returns to go, and each call has its own."""
    grouped = {"group_by": ("uid", "agent", "turn"), "center": "mean", "scale": "std"}
    fixed = {"stat_unit": "call"}
    options = (MappingProxyType(grouped), MappingProxyType(fixed), MappingProxyType({**MIXER, **inner}))
    return Entry(name, source, assumes, "credit.team_value:TeamValue", ESTIMATOR, *options)


def _preset(
    name: str,
    source: str,
    assumes: str,
    gamma_turn: float | None = None,
    free: tuple[str, ...] = (),
    once: bool = False,
    **changes: Any,
) -> Entry:
    """The options of the group-relative estimator, with `changes`; they may be set if they are in `free`. `once`: no
    ratio is clipped, so that one update per step is all that it allows."""
    options = {key: value for key, value in {**GROUP, **changes}.items() if key != "gamma_turn"}
    fixed = {key: value for key, value in options.items() if key not in free}
    given = {**{key: options[key] for key in free}, "gamma_turn": gamma_turn}
    where, needs = "credit.group:group_relative", {"epochs": 1, "mini_batches": 1} if once else {}
    options = (MappingProxyType(given), MappingProxyType(fixed))
    return Entry(name, source, assumes, where, ESTIMATOR, *options, needs=MappingProxyType(needs))


def _function(use: str, name: str, source: str, assumes: str, where: str, **free: Any) -> Entry:
    return Entry(name, source, assumes, where, use, MappingProxyType(free), MappingProxyType({}))


_SEVERAL = "several episodes per sample"
_CRITIC = "every trained policy has a critic"

CATALOGUE: tuple[Entry, ...] = (
    _estimator("grpo", "DeepSeekMath, arXiv 2402.03300", _SEVERAL, "credit.group:group_relative", **GROUP),
    _preset("rloo", "arXiv 2402.14740", _SEVERAL, free=("stat_unit",), center="leave_one_out", scale="none"),
    _preset(
        "magrpo",
        "CoMLRL, arXiv 2508.04652",
        f"{_SEVERAL}; every agent's reward is the team's; one update per step (epochs 1, mini_batches 1)",
        gamma_turn=0.9,
        group_by=("uid", "agent", "node", "turn", "round"),
        stat_unit="call",
        scale="none",
        once=True,
    ),
    _estimator("reinforce", "Williams 1992", "no baseline", "credit.reinforce:reinforce", gamma=1.0),
    _estimator("reinforce_pp", "arXiv 2501.03262", "one episode is enough", "credit.reinforce:reinforce_pp", gamma=1.0),
    _estimator(
        "reinforce_pp_baseline",
        "arXiv 2501.03262",
        _SEVERAL,
        "credit.reinforce:reinforce_pp_baseline",
        **WORTH,
    ),
    _estimator("gae", "PPO, arXiv 1506.02438; IPPO with a policy per agent", _CRITIC, "credit.chain:gae", **GAE),
    _estimator(
        "gae_chain",
        "MARFT, arXiv 2504.16129",
        f"{_CRITIC}; rewards are not copied to other agents",
        "credit.chain:gae_chain",
        **GAE,
    ),
    _estimator(
        "gdpo",
        "arXiv 2601.05242",
        f"{_SEVERAL}; several nodes pay rewards, each a component by its node_id (an env's: of the node that steps it)",
        "credit.gdpo:gdpo",
        **{"weights": {}, **WORTH},
    ),
    _estimator(
        "ippo",
        "arXiv 2011.09533",
        f"{_CRITIC}, which reads what its agents read",
        "credit.critic:ippo",
        **{"stream": "agent", "level": "action", **GAE, "lam": 0.95},
    ),
    _estimator(
        "mappo",
        "arXiv 2103.01955",
        "all trained policies share one critic, which reads all that was said and shown; rewards are not copied to "
        "other agents",
        "credit.critic:mappo",
        **{"level": "action", **GAE, "lam": 0.95, "history_chars": 4000},
    ),
    _mixer(
        "vdn",
        "arXiv 1706.05296",
        f"{_SEVERAL}; rewards are the team's, not copied to other agents; credit only against calls that cannot react",
    ),
    _mixer("qmix", "arXiv 1803.11485", "as vdn; the team's value rises with each message's", **QMIX_ONLY),
    *REWARDS,
    _function(
        BLOCK,
        "happo",
        "arXiv 2109.11251",
        "a policy per agent, none shared; every agent's reward is the team's; with any estimator",
        "workflow.blocks:Happo",
        order="random",
        ratio="clamped",
        bound=4.0,
    ),
    _function(
        BLOCK,
        "cory",
        "arXiv 2410.06101",
        "as many trained policies as roles; rewards are shared (shaping shared); the pioneer is deployed alone",
        "workflow.blocks:Cory",
        every=5,
    ),
    _function(
        BLOCK,
        "uncertainty",
        "UMAD, arXiv 2603.01221",
        "several episodes per sample; with any estimator; a group is the rows of one sample and agent",
        "workflow.blocks:Uncertainty",
        alpha=0.25,
        bound=5.0,
    ),
    _function(
        BLOCK,
        "importance",
        "truncated: fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv 2510.18855",
        "old_log_probs of the trainer; with any estimator and policy loss",
        "workflow.blocks:Importance",
        cap=2.0,
        level="token",
        mode="truncate",
    ),
    _function(
        BLOCK,
        "overlong",
        "DAPO, arXiv 2503.14476",
        "with any estimator; what is left out of the loss stays in the baselines",
        "workflow.blocks:Overlong",
        mask=False,
        penalty=None,
    ),
    _function(
        LIBRARY,
        "mixer credit",
        "COMA, DOP (arXiv 2007.12322)",
        "siblings answered one prompt; weighed by held-out explained variance",
        "credit.mixer_credit:control_variate",
    ),
)

ENTRIES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in CATALOGUE})
SELECTABLE: tuple[str, ...] = tuple(entry.name for entry in CATALOGUE if entry.use == ESTIMATOR)
WITH_VALUES = frozenset({"gae", "gae_chain", "ippo", "mappo"})
"""Estimators that need a critic's values."""
MIXED = frozenset({"vdn", "qmix"})
"""Estimators that learn the team's value on the driver, with `algorithm.mixer`."""
SPANNING = frozenset({"gae_chain", "mappo"}) | MIXED
"""Estimators that see the rows of all policies at once, and carry rewards from one agent to another."""
CENTRAL = frozenset({"mappo"})
"""Estimators with one critic for all, which reads the joint history: each call is a row of its own."""


REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "at_grpo": "no tree of alternatives is sampled; write `estimator: grpo, group_by: [uid, agent, turn, round]`",
        "dr_mas": "grpo compares each agent with itself already; write `estimator: grpo`",
        "m_grpo": "no calls are aligned, and grpo compares each agent with itself already; write `estimator: grpo`",
    }
)
"""Names that meant an estimator of another name, and what to write."""


def chains_calls(algorithm: Any) -> bool:
    """Whether one chain of tokens runs through calls that the policy of one row did not make, or that have values of
    their own: an episode is then left out whole or not at all (vdn and qmix read the episode itself)."""
    streams = algorithm.estimator == "ippo" and algorithm.stream == "agent"
    return algorithm.estimator in SPANNING - MIXED or algorithm.estimator == "gae" or streams


def unscored_scope(algorithm: Any) -> str:
    """Which calls an unscored call takes out with it, since what they are worth is unknown: `call` (itself alone),
    `earlier` (its agent's calls up to it), `trajectory` (all of its agent's) or `episode`."""
    if algorithm.estimator in SPANNING:
        return "episode"
    if "stat_unit" in ENTRIES[algorithm.estimator].options:
        if algorithm.stat_unit == "trajectory":
            return "trajectory"
        return "earlier" if algorithm.gamma_turn else "call"
    return "call" if algorithm.estimator == "ippo" and algorithm.stream == "call" else "earlier"


def advantages_per_turn(algorithm: Any) -> bool:
    """Whether the advantages of an episode differ by turn by construction: each call is worth something of its own, or
    what is earned from it on. Otherwise (`stat_unit: trajectory`) one return is every turn's."""
    return "stat_unit" not in ENTRIES[algorithm.estimator].options or algorithm.stat_unit == "call"


def carries_back(algorithm: Any) -> bool:
    """Whether the estimator itself credits a call with what its agent earns after it."""
    if algorithm.estimator in MIXED:
        return algorithm.mixer.gamma_turn > 0
    if "stat_unit" in ENTRIES[algorithm.estimator].options:
        return algorithm.stat_unit == "trajectory" or bool(algorithm.gamma_turn)
    return algorithm.estimator != "ippo" or algorithm.stream == "agent"


def contradictions(estimator: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `given` whose values are not those that `estimator` fixes or needs, with the values that it has."""
    fixed = {**ENTRIES[estimator].fixed, **ENTRIES[estimator].needs}
    return {key: value for key, value in fixed.items() if key in given and given[key] != value}


def table() -> str:
    """The catalogue as text, one paragraph per use."""
    paragraphs = []
    for use in (ESTIMATOR, BLOCK, REWARD, SHAPING, LIBRARY):
        lines = [f"# {use}"]
        for entry in CATALOGUE:
            if entry.use == use:
                lines += [f"{entry.name} ({entry.source})", f"    assumes: {entry.assumes}"]
                options = _options(entry)
                lines += [f"    options: {options}"] if options else []
                lines += [f"    code: recipe.dag.{entry.where}"]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _options(entry: Entry) -> str:
    def shown(value: Any) -> str:
        return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)

    must = [f"{key} (required)" for key in entry.takes if key not in entry.free]
    fixed = [f"{key}={shown(value)} (fixed)" for key, value in {**entry.fixed, **entry.needs}.items()]
    encoder = {f"encoder.{key}": value for key, value in entry.inner.get("encoder", {}).items()}
    inner = {key: value for key, value in entry.inner.items() if key != "encoder"} | encoder
    free = {**entry.free, **{f"mixer.{key}": value for key, value in inner.items()}}
    return ", ".join([*must, *fixed, *(f"{key}={shown(value)}" for key, value in free.items())])
