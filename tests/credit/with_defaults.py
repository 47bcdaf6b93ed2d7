"""Functions of recipe/dag/credit with the defaults of the options that their algorithm or block declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from pydantic import BaseModel

from recipe.dag.algorithms.blocks import Importance, Uncertainty
from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.mixer import Mixer
from recipe.dag.credit import chain, critic, group, importance, mixer_fit, uncertainty
from recipe.dag.credit import gdpo as gdpo_module
from recipe.dag.credit import reinforce as reinforce_module
from recipe.dag.credit.joint_advantages import joint_advantages
from recipe.dag.credit.joint_value import joint_values
from recipe.dag.credit.mixer_batch import team_returns


def with_defaults(function: Callable, options: BaseModel) -> Callable:
    """Return the function with the values of `options` for its keyword-only parameters of the same names."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in type(options).model_fields]
    return partial(function, **{name: getattr(options, name) for name in names})


gae = with_defaults(chain.gae, make_algorithm("gae"))
gae_chain = with_defaults(chain.gae_chain, make_algorithm("gae_chain"))
gdpo = with_defaults(gdpo_module.gdpo, make_algorithm("gdpo"))
group_relative = with_defaults(group.group_relative, make_algorithm("grpo"))
zero_variance = with_defaults(group.zero_variance, make_algorithm("grpo"))
ippo = with_defaults(critic.ippo, make_algorithm("ippo"))
mappo = with_defaults(critic.mappo, make_algorithm("mappo"))
reinforce = with_defaults(reinforce_module.reinforce, make_algorithm("reinforce"))
reinforce_pp = with_defaults(reinforce_module.reinforce_pp, make_algorithm("reinforce_pp"))
reinforce_pp_baseline = with_defaults(reinforce_module.reinforce_pp_baseline, make_algorithm("reinforce_pp_baseline"))
importance_weights = with_defaults(importance.importance_weights, Importance())
uncertainty_weights = with_defaults(uncertainty.uncertainty_weights, Uncertainty())


def fit(model, optimizer, batch, *, steps: int = 1000, **options) -> float:
    """Fit the joint value with the options of `algorithm.mixer` that a test does not set, and practically no limit on
    the steps of an epoch."""
    mixer = Mixer.model_validate({})
    defaults = {"gamma_turn": mixer.gamma_turn, "lam": mixer.lam, "tau": mixer.target_tau}
    return mixer_fit.fit(model, optimizer, batch, steps=steps, **defaults | options)


def advantages_of(model, batch, *, form: str = "control_variate", returns=None, utilities=None):
    """Return the joint advantages for the batch's undiscounted returns and the model's utilities, unless passed."""
    if returns is None:
        returns = team_returns(batch, gamma_turn=1.0)
    if utilities is None:
        utilities = joint_values(model, batch)[1]
    return joint_advantages(model, batch, returns, utilities, form=form)
