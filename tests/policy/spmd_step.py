"""One rank of a training step, for tests that compare engines: python spmd_step.py RANK WORLD MODEL UNTIED OUT.

Every rank runs the driver's half of the step itself and gathers what the others computed, so that the step is the
product's own, from the layout of the rows to the optimizer. Reads OUT/score.py, a reward, and writes
OUT/<engine>_<loss>.pt for each of `cases`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ENGINES = {
    "padded": ["model.use_remove_padding=false"],  # verl's engine: sdpa under a mask, logits
    "packed": [],
    "packed_logits": ["model.use_fused_kernels=false"],
}
FREED = "actor.fsdp_config.reshard_after_forward=true"
CHECKPOINTED = "model.enable_gradient_checkpointing=true"
UNTIED = {  # of the model UNTIED, whose output embeddings FSDP gathers and frees apart from the other parameters
    "untied_padded": [*ENGINES["padded"], FREED],
    "untied": [FREED],
    "untied_kept": ["actor.fsdp_config.use_no_sync_for_gradient_accumulation=false"],
    "untied_checkpointed": [FREED, CHECKPOINTED],
    "untied_kept_checkpointed": [CHECKPOINTED, "model.recompute_mlp_only=1"],
}
CANARY = list(range(5, 69))
LOSSES = {"vanilla": "token-mean", "cpgd": "seq-mean-token-sum"}
SHARED = ["actor.fsdp_config.ulysses_sequence_parallel_size=2"]
"""Both ranks compute each row together."""
WORKFLOW = """\
dag_id: tiny
agents: [{{name: solver, policy: main}}]
policies: {{main: {{model: {{path: {model}}}, reference: true, critic: {{cliprange_value: 0.2}}}}}}
algorithm: {{estimator: gae, kl_loss_coef: 0.1, entropy_coef: 0.01, policy_loss: {loss}, loss_agg: {agg},
  old_log_probs: trainer}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, reward: score.py:score, after: solve}}
"""

PAIRS = """\
dag_id: tiny
agents: [{{name: solver, policy: main}}]
policies: {{main: {{model: {{path: {model}}}, reference: {{refresh: 1}}}}}}
algorithm: {{estimator: {loss}, beta: 0.5, sft_coef: 0.1, entropy_coef: 0.01}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, reward: score.py:score, after: solve}}
"""


def cases(world: int) -> list[tuple[str, str]]:
    """Return (engine, loss). No engine knows the loss: one of them, the product's on CPUs, has them all on both worlds.
    After a step of spin the reference is renewed."""
    found = [("padded", "vanilla"), ("packed_logits", "vanilla"), *((name, "vanilla") for name in UNTIED)]
    found += [("packed", loss) for loss in ("vanilla", "cpgd", "spin")]
    return found + ([("padded", "cpgd"), ("padded", "spin")] if world == 1 else [("shared", loss) for loss in LOSSES])


def episodes(*, paired: bool) -> list:
    """Nine ragged conversations with a tool's tokens in the middle, sampled at three temperatures. `paired`: those of a
    sample have one prompt."""
    import torch

    from recipe.dag.types.record import Call, Episode

    draw = torch.Generator().manual_seed(3)

    def some(low: int, high: int) -> list[int]:
        return torch.randint(2, 96, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw).tolist()

    made = []
    for index in range(9):
        episode = Episode(uid=f"u{index // 3}", index=index % 3, sample={}, turns=1, done=True)
        first, tool, last = some(2, 20), some(0, 9), some(2, 12)
        mask = [1] * len(first) + [0] * len(tool) + [1] * len(last)
        log_probs = [-5.0 if bit else 0.0 for bit in mask]
        prompt = some(1, 60)
        if paired and made and made[-1].uid == episode.uid:
            prompt = made[-1].calls[0].prompt_ids
        call = Call("solve", "solver", 0, "main", 0, prompt, first + tool + last, mask, log_probs)
        call.temperature = (1.0, 0.7, 1.3)[index % 3]
        call.reward = float(torch.randn(1, generator=draw))
        episode.calls.append(call)
        made.append(episode)
    return made


def run(rank: int, world: int, tied: str, untied: str, out: Path) -> None:
    from recipe.dag.platform.environment import prepare_environment
    from recipe.dag.settings.compose import compose_config

    prepare_environment("cpu")
    import torch
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu

    from recipe.dag.episode.rows import rows_of
    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.policy.config import policy_config
    from recipe.dag.policy.placement import Pool
    from recipe.dag.policy.worker import PolicyWorker
    from recipe.dag.settings import defaults
    from recipe.dag.train.step import TrainingStep

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)

    def gathered(method, data):
        """As verl dispatches: each rank, or group of ranks, gets an equal part of the rows, in order; the first of a
        group returns what it computed."""
        parts = [None] * world
        output = method(tu.chunk_tensordict(data, groups)[rank * groups // world])
        output = tu.get_tensordict({}, {}) if output is None else output
        dist.all_gather_object(parts, {key: output[key].unbind() for key in output.keys() if key != "metrics"})
        joined = {key: [row for part in parts[:groups] for row in part[key]] for key in parts[0]}
        columns = {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for key, rows in joined.items()}
        return tu.get_tensordict(columns, {"metrics": tu.get(output, "metrics", default={})})

    engines = ENGINES | UNTIED | {"shared": SHARED}
    for name, loss in cases(world):
        model, overrides, agg = untied if name in UNTIED else tied, engines[name], LOSSES.get(loss, "")
        flow = out / f"{name}_{loss}_{rank}.yaml"
        flow.write_text((WORKFLOW if agg else PAIRS).format(model=model, loss=loss, agg=agg))
        workflow = load_workflow(flow)
        settings = ["actor.ppo_max_token_len_per_gpu=150", "actor.optim.lr=0.01", *overrides]
        run = compose_config(
            "dag",
            [
                *(f"actor_rollout_ref.{setting}" for setting in settings),
                f"workflow={flow}",
                "data.train_files=none",
                "data.max_prompt_length=64",
                "data.max_response_length=64",
            ],
        )
        defaults.apply(run, defaults.on_cpu(run))
        paths = {"model_path": model, "critic_path": model if agg else None}
        config = policy_config(run, workflow, "main", **paths, processes=world, updates=100, platform="cpu")
        groups = 1 if overrides is SHARED else world
        again = [setting for setting in overrides if "mlp_only" not in setting]  # which the engine's options have
        config.merge_with_dotlist([f"actor_rollout_ref.{setting}" for setting in again])  # CPUs' settings differ
        critic = config.critic if agg else None
        worker = PolicyWorker(config.actor_rollout_ref, role="actor_rollout_ref", critic=critic)
        worker.init_model()
        with torch.no_grad():  # else the KL to the reference has no gradient
            for parameter in worker.ref.engine.module.parameters():
                parameter.mul_(1.05)
            if worker.critic is not None:
                for parameter in worker.critic.engine.module.score.parameters():  # else all values are 0
                    parameter.fill_(0.1)
        engine, results = worker.actor.engine, {}
        results["canary"] = torch.tensor(worker.score_canary(CANARY)[0])
        step_of = engine.optimizer_step
        held, note_held = watch_head(engine.module)

        def record(engine=engine, results=results, step_of=step_of, held=held, note_held=note_held) -> float:
            note_held()
            results["held"] = list(held)  # without what the canary adds after the update
            results["gradient"] = flat(p.grad for p in engine.module.parameters())
            return step_of()

        engine.optimizer_step = record
        methods = ("compute_log_prob", "compute_ref_log_prob", "compute_values", "update_actor", "update_critic")
        policy = SimpleNamespace(
            config=config,
            data_parallel_size=groups,
            workers=SimpleNamespace(**{m: partial(gathered, getattr(worker, m)) for m in methods}),
            tokenizer=SimpleNamespace(pad_token_id=0),
            pool=Pool(None, 1),
            processes=None,
        )
        rows = rows_of(episodes(paired=not agg))
        step = TrainingStep(workflow, {"main": policy}, rows, seed=0)
        asyncio.run(step.run())
        updated, worker.canary_scores = worker.canary_scores, None
        again = worker.score_canary(CANARY)[0]  # [] on a rank whose group's first one has the outputs
        assert updated == again and (again != results["canary"].tolist() or groups == 1 == rank)
        batch = step.batches["main"]
        columns = batch.columns
        masks = [torch.tensor(row.response_mask).bool() for row in batch.rows]
        for key in ("old_log_probs", "ref_log_prob", "entropy", *(["values"] if worker.critic else [])):
            results[key] = torch.cat([column[mask] for column, mask in zip(columns[key], masks, strict=True)])
        check_sent_weights(engine)
        results["weights"] = flat(engine.module.parameters())
        if worker.critic is not None:
            results["critic"] = flat(worker.critic.engine.module.parameters())
        else:
            check_renewal(worker, policy, batch, out / "reference")
        results["attention"] = engine.module.config._attn_implementation
        results["fused"] = getattr(engine, "fused", None)
        if rank == 0:
            torch.save(results, out / f"{name}_{loss}.pt")
    dist.destroy_process_group()


def check_sent_weights(engine) -> None:
    """Servers get whole weights, those of matrices in their number format."""
    import torch

    engine.served_dtype, served = torch.bfloat16, engine.served_dtype
    assert served == torch.float32, "that of the servers of this platform"
    found, adapter = engine.get_per_tensor_param()
    expected = {name: weight.full_tensor() for name, weight in engine.module.state_dict().items()}
    for name, weight in found:
        whole = expected.pop(name)
        torch.testing.assert_close(weight, whole.bfloat16() if whole.dim() > 1 else whole, rtol=0, atol=0)
    assert set(expected) <= {"lm_head.weight"} and adapter is None
    assert bool(expected) == engine.module.config.tie_word_embeddings, "a tied weight is sent once"


def check_renewal(worker, policy, batch, folder: Path) -> None:
    """A renewed reference is the policy, bit by bit, and a saved one can be loaded."""
    import torch

    from recipe.dag.train import kernels

    def same(expected) -> bool:
        kernels.reference_log_probs(policy, batch)
        pairs = zip(batch.columns["ref_log_prob"], expected, strict=True)
        return all(torch.equal(*pair) for pair in pairs)

    updated = kernels.log_probs(policy, batch)
    assert not same(updated)
    worker.renew_reference()
    assert same(updated)
    worker.save_reference(str(folder))
    with torch.no_grad():
        for parameter in worker.ref.engine.module.parameters():
            parameter.mul_(1.05)
    assert not same(updated)
    worker.load_reference(str(folder))
    assert same(updated)


def watch_head(model):
    """Return a list, and a function that appends to it, as does each forward pass of the model when it ends: the bytes
    of the gathered output embeddings that are in memory."""
    gathered, held = [], []

    def note_held(*_: object) -> None:
        held.append(gathered[-1].untyped_storage().nbytes())

    # before FSDP's own hook, which frees them
    model.lm_head.register_forward_hook(lambda head, *_: gathered.append(head.weight), prepend=True)
    model.register_forward_hook(note_held)
    return held, note_held


def flat(tensors):
    import torch

    return torch.cat([t.full_tensor().detach().flatten() for t in tensors])


if __name__ == "__main__":
    rank, world, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[5])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    run(rank, world, *sys.argv[3:5], out)
