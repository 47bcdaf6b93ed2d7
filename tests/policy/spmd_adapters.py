"""One rank of updates of two adapters and a critic on one model: python spmd_adapters.py RANK WORLD MODEL OUT.

Writes OUT/result.pt, what the tests compare, OUT/merged_*, PEFT folders, and OUT/mid/*, a checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

WORKFLOW = """\
dag_id: adapters
agents: [{{name: one, policy: a}}, {{name: two, policy: b}}]
policies:
  base: {{model: {{path: {model}}}, frozen: true}}
  a: {{lora: {{base: base, rank: 4}}, lr: 0.01, reference: true, critic: {{lr: 0.03, rank: 3}}}}
  b:
    lora: {{base: base, rank: 2, alpha: 6, targets: [q_proj, v_proj, up_proj]}}
    lr: 0.02
    reference: true
    critic: {{share: a}}
algorithm: {{estimator: gae, kl_loss_coef: 0.1}}
nodes:
  - {{id: one, agent: one}}
  - {{id: two, agent: two, after: one}}
  - {{id: reward, reward: score.py:score, after: two}}
"""
CRITIC = "a/critic"
NAMES = ("a", CRITIC, "b")
HISTORY = [("a", 1), ("a", 2), (CRITIC, 8), ("b", 3), (CRITIC, 6), ("a", 4), ("b", 5), (CRITIC, 7)]
MIDDLE = 4
"""The number of updates before the checkpoint."""


def rows(seed: int) -> list:
    import torch

    from recipe.dag.types.row import Row

    draw = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(2, 96, (count,), generator=draw).tolist()

    def row(index: int) -> Row:
        return Row("u", index, index, "a", 0, some(5 + index), some(6), [1] * 6, [-3.0] * 6, calls=())

    return [row(index) for index in range(4)]


def advantages(seed: int) -> list:
    import torch

    draw = torch.Generator().manual_seed(seed + 100)
    return [torch.randn(6, generator=draw) for _ in range(4)]


class Trainer:
    """A worker, and the driver's half of its passes; each rank takes its part of the rows."""

    def __init__(self, config, trained, *, rank: int, world: int):
        from recipe.dag.policy.adapter_worker import AdapterWorker

        self.rank, self.world = rank, world
        self.worker = AdapterWorker(config.actor_rollout_ref, "actor_rollout", adapters=tuple(trained))
        self.worker.init_model()
        self.engine = self.worker.actor.engine

    def _data(self, seed: int, adapter: str, **meta):
        from verl.utils import tensordict_utils as tu

        from recipe.dag.train.kernels import to_tensordict

        order = list(range(4))[self.rank :: self.world]
        data = to_tensordict(rows(seed), order, pad_token_id=0)
        tu.assign_non_tensor(data, adapter=adapter, calculate_entropy=False, **meta)
        return order, data

    def log_probs(self, seed: int, adapter: str, *, reference: bool = False) -> dict:
        from verl.workers.utils.padding import response_from_nested

        order, data = self._data(seed, adapter, compute_loss=False)
        call = self.worker.compute_ref_log_prob if reference else self.worker.compute_log_prob
        mask = data["response_mask"]
        output = response_from_nested(call(data)["log_probs"], mask).unbind()
        return dict(zip(order, (row.float() for row in output), strict=True))

    def values(self, seed: int) -> dict:
        from verl.workers.utils.padding import response_from_nested

        order, data = self._data(seed, CRITIC, compute_loss=False)
        mask = data["response_mask"]
        output = response_from_nested(self.worker.compute_values(data)["values"], mask).unbind()
        return dict(zip(order, (row.float() for row in output), strict=True))

    def update(self, adapter: str, seed: int) -> None:
        import torch
        from verl.utils import tensordict_utils as tu

        random = dict(enumerate(advantages(seed)))
        if adapter == CRITIC:
            columns = {"values": self.values(seed), "returns": random}
        else:
            columns = {
                "old_log_probs": self.log_probs(seed, adapter),
                "ref_log_prob": self.log_probs(seed, adapter, reference=True),
                "advantages": random,
            }
        order, data = self._data(seed, adapter, compute_loss=True)
        for name, column in columns.items():
            data[name] = torch.nested.as_nested_tensor([column[index] for index in order], layout=torch.jagged)
        tu.assign_non_tensor(data, distillation_use_topk=False, distillation_only=False, global_batch_size=4.0)
        tu.assign_non_tensor(data, num_mini_batch=1, epochs=1, seed=0, dataloader_kwargs={"shuffle": False})
        (self.worker.update_critic if adapter == CRITIC else self.worker.update_actor)(data)

    def base(self) -> dict:
        states = self.engine.module.state_dict()
        return {
            name: whole(value).clone()
            for name, value in states.items()
            if ".lora_" not in name and not name.startswith("value_")
        }

    def whole(self, adapter: str) -> dict:
        """Return a copy of the adapter's weights, those of a critic with its head."""
        head = self.engine.whole_head(adapter)
        whole = self.engine.whole(adapter) | ({"head": (head["weight"], head["bias"])} if head else {})
        return {layer: (a.clone(), b.clone()) for layer, (a, b) in whole.items()}


def whole(value):
    """Return the whole of a tensor that FSDP may have sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients(trainer: Trainer, adapter: str, seed: int) -> dict:
    """Return the gradients of an adapter, and of all other weights that got one."""
    found = {}
    step = trainer.engine.optimizer_step

    def record() -> float:
        for name, weight in trainer.engine.module.named_parameters():
            if weight.grad is not None:
                found[name] = whole(weight.grad).clone()
        return step()

    trainer.engine.optimizer_step = record
    trainer.update(adapter, seed)
    trainer.engine.optimizer_step = step
    return found


def run(rank: int, world: int, model: str, out: Path) -> None:
    from recipe.dag.platform.environment import prepare_environment
    from recipe.dag.settings.compose import compose_config

    prepare_environment("cpu")
    import torch
    import torch.distributed as dist

    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.policy.adapter_config import host_config, trained_adapters
    from recipe.dag.policy.config import policy_config
    from recipe.dag.settings import defaults
    from recipe.dag.workflow.adapter_shape import shape_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    flow = out / f"flow_{rank}.yaml"
    flow.write_text(WORKFLOW.format(model=model))
    workflow = load_workflow(flow)
    lengths = ["data.max_prompt_length=64", "data.max_response_length=64"]
    composed = compose_config("dag", [f"workflow={flow}", "data.train_files=none", *lengths, *sys.argv[5:]])
    defaults.apply(composed, defaults.on_cpu(composed))
    configs = {
        name: policy_config(
            composed,
            workflow,
            name,
            model_path=model,
            critic_path=model if name == "a" else None,
            updates=100,
            platform="cpu",
        )
        for name in ("base", "a", "b")
    }
    configs[CRITIC] = configs["a"]
    shapes = {name: shape_of(workflow.policies[name].lora) for name in ("a", "b")}
    every = [
        adapter
        for name in "ab"
        for adapter in trained_adapters(name, workflow.policies[name], shapes[name], configs[name], None)
    ]

    def made(trained) -> Trainer:
        config = host_config(configs, "base", trained, shapes, platform="cpu")
        return Trainer(config, trained, rank=rank, world=world)

    result: dict = {"world": world}
    together = made(every)
    result["names"] = sorted(together.engine.module.state_dict())
    result["at_start"] = {name: together.log_probs(9, name) for name in "ab"}
    result["values_at_start"] = together.values(9)
    result["reference_at_start"] = together.log_probs(9, "a", reference=True)
    before = together.base()
    for name in "ab":
        together.worker.write_adapter(name, str(out / f"stale_{name}"), [])
    for number, (name, seed) in enumerate(HISTORY):
        if number == MIDDLE:
            for adapter in NAMES:
                together.worker.save_adapter(adapter, str(out / "mid" / adapter))
        others = {adapter: together.whole(adapter) for adapter in NAMES if adapter != name}
        result["b_was_idle"] = not together.engine.optimizers["b"].state if number < 2 else result["b_was_idle"]
        together.update(name, seed)
        same = [equal(together.whole(adapter), pairs) for adapter, pairs in others.items()]
        result.setdefault("others_same", []).append(all(same))
    result["base_same"] = all(torch.equal(value, before[name]) for name, value in together.base().items())
    result["together"] = {name: together.whole(name) for name in NAMES}
    result["log_probs"] = {name: together.log_probs(9, name) for name in "ab"}
    result["reference"] = together.log_probs(9, "b", reference=True)
    result["values"] = together.values(9)
    result["steps"] = {name: together.engine.schedulers[name].last_epoch for name in NAMES}
    for name in "ab":
        together.worker.write_adapter(name, str(out / f"written_{name}"), [str(out / f"stale_{name}")])
    together.worker.save_adapter(CRITIC, str(out / "written_a_critic"))
    result["alone"] = {}
    for adapter in every:
        alone = made([adapter])
        for name, seed in HISTORY:
            if name == adapter.name:
                alone.update(name, seed)
        result["alone"][adapter.name] = alone.whole(adapter.name)
    resumed = made(every)
    if world == 1:  # as if the other kind of engine had written it
        file = together.engine.state_file(out / "mid" / "a")
        state = torch.load(file, weights_only=True)
        for moments in state["optimizer"]["state"].values():
            moments |= {key: other_kind(moments[key], together.engine.device_mesh) for key in ("exp_avg", "exp_avg_sq")}
        torch.save(state, file)
    for adapter in NAMES:
        resumed.worker.load_adapter(adapter, str(out / "mid" / adapter))
    for name, seed in HISTORY[MIDDLE:]:
        resumed.update(name, seed)
    result["resumed"] = {name: resumed.whole(name) for name in NAMES}
    result["gradients"] = {name: gradients(together, name, 7) for name in ("a", CRITIC)}
    if rank == 0:
        torch.save(result, out / "result.pt")
    dist.destroy_process_group()


def other_kind(value, mesh):
    """Return a tensor of one rank that FSDP has not sharded as one that it has, and the other way round."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    return value.to_local() if isinstance(value, DTensor) else distribute_tensor(value, mesh, [Replicate()])


def equal(one: dict, other: dict) -> bool:
    import torch

    return all(torch.equal(x, y) for name in one for x, y in zip(one[name], other[name], strict=True))


if __name__ == "__main__":
    rank, world, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    run(rank, world, sys.argv[3], out)
