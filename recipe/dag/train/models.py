"""Paths of the policies' and critics' initial weights.

Invariant: every model is checked before the first process starts; one that cannot be loaded, or cannot be a critic, is
a UserError that names the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.dag.core.errors import UserError
from recipe.dag.settings.absolute import absolute, absolute_if_local
from recipe.dag.types.model import Model
from recipe.dag.workflow.adapter_shape import shape_of
from recipe.dag.workflow.agent_schema import Critic, Policy
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """A local folder or a hub name for each policy, and for each critic by the policy that owns it."""

    policies: dict[str, str]
    critics: dict[str, str]
    adapters: dict[str, str] = field(default_factory=dict)
    """The PEFT folders at which adapters start."""
    encoder: str | None = None
    """Model of the mixer's text encoder; None for estimators without a mixer."""

    def folders(self) -> list[str]:
        """Return the models that are local folders."""
        paths = {*self.policies.values(), *self.critics.values(), *self.adapters.values()}
        paths |= {self.encoder} if self.encoder else set()
        return sorted(path for path in paths if Path(path).is_dir())


def find_models(workflow: Workflow) -> ModelPaths:
    """Return the paths of all models, with environment variables filled in. Raises UserError for a model that cannot be
    loaded, for one whose architecture cannot have a value head, and for a critic that policies with different
    vocabularies share."""
    policies = {
        name: _load(workflow.policies[name].model, f"policies.{name}.model.path")[0]
        for name in workflow.local_policies()
    }
    critics = {}
    for name in workflow.trained_policies():
        critic = workflow.policies[name].critic
        if critic is not None and critic.share is not None:
            _check_vocabulary(workflow, policies, name, critic.share)
        elif critic is not None and workflow.policies[name].lora is not None:
            critics[name] = policies[workflow.base_of(name)]
        elif critic is not None:
            critics[name] = _critic(workflow.policies[name], critic, name)
    return ModelPaths(policies, critics, _adapters(workflow, policies), _encoder(workflow, policies))


def _adapters(workflow: Workflow, paths: dict[str, str]) -> dict[str, str]:
    """Return the folders at which adapters start. Raises UserError for an adapter that does not fit its base."""
    folders = {}
    for name, policy in workflow.policies.items():
        if policy.lora is None:
            continue
        from recipe.dag.platform.adapter_weights import read_adapter, target_layers  # imports torch

        where = f"policies.{name}.lora"
        shape = shape_of(policy.lora, f"{where}.path")
        model = skeleton(paths[policy.lora.base], trust_remote_code=policy.model.trust_remote_code)
        try:
            layers = target_layers(model, shape.targets)
            if policy.lora.path is not None:
                folders[name] = absolute(resolve_env(policy.lora.path))
                read_adapter(Path(folders[name]), layers)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return folders


def skeleton(path: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return a model without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _encoder(workflow: Workflow, policies: dict[str, str]) -> str | None:
    mixer, trained = workflow.algorithm.team_value, workflow.trained_policies()
    if mixer is None or not trained:
        return None
    model = mixer.encoder.model
    return (
        policies[workflow.base_of(trained[0])]
        if model is None
        else _load(model, "algorithm.mixer.encoder.model.path")[0]
    )


def _critic(policy: Policy, critic: Critic, name: str) -> str:
    from transformers import AutoModelForTokenClassification

    where = f"policies.{name}.model.path" if critic.model is None else f"policies.{name}.critic.model.path"
    path, config = _load(critic.model or policy.model, where)
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise UserError(
            f"{where}: transformers has no token classifier for {config.model_type}, so it cannot be a critic; set "
            f"another model in policies.{name}.critic.model"
        )
    return path


def _check_vocabulary(workflow: Workflow, paths: dict[str, str], name: str, owner: str) -> None:
    # a critic reads token ids, so they must have the same meaning for all policies that share it
    one, other = (
        load_tokenizer(workflow.policies[policy].model, paths[workflow.base_of(policy)]) for policy in (name, owner)
    )
    if one.get_vocab() != other.get_vocab():
        raise UserError(
            f"policies.{name}.critic.share: {owner} and {name} have different vocabularies, and a critic reads token "
            f"ids; give {name} its own critic: write `critic: {{}}`"
        )


def load_tokenizer(model: Model, path: str, **options: Any) -> Any:
    """Return the tokenizer of a policy. `path`: its weights. `options`: of transformers."""
    from transformers import AutoTokenizer

    source = model.tokenizer_path or path
    return AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code, **options)


def _load(model: Model, where: str) -> tuple[str, Any]:
    return load_model(resolve_env(model.path, where), where, trust_remote_code=model.trust_remote_code)


def load_model(path: str, where: str, *, trust_remote_code: bool = False) -> tuple[str, Any]:
    """Return a model's path, absolute if it is a folder, and its transformers configuration. `where`: the key or option
    that names it. Raises UserError."""
    from transformers import AutoConfig

    local = Path(path).expanduser()
    if not path.strip() or (not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1)):
        raise UserError(
            f"{where}: {path or '(empty)'} is not a model directory; pass a local folder or a hub name like org/model"
        )
    if local.is_dir() and not (local / "config.json").is_file():
        raise UserError(f"{where}: {path} is not a model directory (config.json is missing)")
    path = absolute_if_local(path) or path
    try:
        return path, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"{where}: {path} cannot be loaded ({str(error).strip().splitlines()[0]})") from error
