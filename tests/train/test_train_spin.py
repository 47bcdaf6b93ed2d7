"""Preference losses on verl's own engine: the gradient is autograd's, optimizer steps are those written by hand, and
references are renewed when they are due."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.app.launch import launch
from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.train import kernels
from recipe.dag.train.given_rows import check_given, given_rows
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.train.packing import PAD
from recipe.dag.train.paired_updates import deal
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row
from recipe.dag.workflow.agent_schema import Reference
from recipe.dag.workflow.training_chain import derive_training_chain
from tests.rows import build_row, merge_rows
from tests.train.projects import edit, go, inputs, overrides_of, save
from tests.train.steps import policy_on

TOOL = 5
"""The id of tokens that a tool put in."""
BETA = 0.7


def some_rows(temperature: float = 1.0, samples: int = 4) -> list[Row]:
    """Samples of three answers of different lengths, with a tool's tokens in the middle; the second answer is the best,
    the first the worst."""
    rng, rows = random.Random(5), []
    for number in range(samples):
        prompt = [rng.randrange(7, 96) for _ in range(3 + number)]
        for episode, reward in enumerate([0.0, 1.0, 0.5]):
            first, last = ([rng.randrange(7, 96) for _ in range(rng.randrange(1, 6))] for _ in range(2))
            tool = [TOOL] * rng.randrange(1, 4)
            mask = [1] * len(first) + [0] * len(tool) + [1] * len(last)
            facts = {"uid": f"u{number}", "episode": episode, "prompt": prompt, "response": first + tool + last}
            rows.append(build_row(reward, mask=mask, temperature=temperature, **facts))
    return rows


@pytest.fixture(scope="module")
def models(engine) -> Iterator[SimpleNamespace]:
    """The engine's actor and its reference, moved away from it, as models of transformers. The engine's weights are put
    back afterwards."""
    modules = {"actor": engine.worker.actor.engine.module, "ref": engine.worker.ref.engine.module}
    before = {name: [p.to_local().clone() for p in module.parameters()] for name, module in modules.items()}
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in modules["ref"].parameters():
            local = parameter.to_local()
            local.add_(0.03 * torch.randn(local.shape, generator=draw))

    def copy_of(name: str):
        path = engine.config.actor_rollout_ref.model.path
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        weights = {key: value.full_tensor() for key, value in modules[name].state_dict().items()}
        model.load_state_dict(weights, strict=False)
        return model

    def reset(name: str = "actor") -> None:
        with torch.no_grad():
            for parameter, own in zip(modules[name].parameters(), before[name], strict=True):
                parameter.to_local().copy_(own)

    yield SimpleNamespace(of=copy_of, reset=reset)
    for name in modules:
        reset(name)


@pytest.fixture
def train(engine, models, monkeypatch):
    """Runs a step on rows; returns its gradients, one per optimizer step, and its metrics. `lr`: that of plain gradient
    descent; by default the weights stay."""
    worker = engine.worker
    parameters = list(worker.actor.engine.module.parameters())

    def run(
        rows: list[Row], *, micro_batch: int = 2, lr: float = 0.0, episodes: Sequence[Episode] = (), **options
    ) -> SimpleNamespace:
        gradients, moves = [], []

        def descend() -> float:
            gradients.append([parameter.grad.full_tensor().clone() for parameter in parameters])
            with torch.no_grad():
                for parameter in parameters:
                    parameter.to_local().sub_(lr * parameter.grad.to_local())
            return 0.0

        schedule = worker.actor.engine.lr_scheduler
        monkeypatch.setattr(worker.actor.engine, "optimizer_step", descend)
        monkeypatch.setattr(schedule, "step", lambda: moves.append(len(gradients)))
        algorithm = make_algorithm("spin", **({"beta": BETA} | options))
        policies = {"main": engine.workflow.policies["main"].model_copy(update={"critic": None})}
        nodes = derive_training_chain(policies, [], algorithm)
        workflow = engine.workflow.model_copy(update={"algorithm": algorithm, "policies": policies, "nodes": nodes})
        loss_config = worker.loss_fn.keywords["config"]
        for name, value in (("loss_agg_mode", "seq-mean-token-sum"), ("use_kl_loss", False)):
            monkeypatch.setitem(loss_config.__dict__, name, value)
        endpoint = PolicyEndpoint(SimpleNamespace(), Words(), max_model_len=64)  # pyright: ignore[reportArgumentType]
        runtime = policy_on(worker, engine.config, micro_batch=micro_batch, endpoint=endpoint)
        step = TrainingStep(workflow, {"main": runtime}, rows, episodes=episodes, seed=3)
        asyncio.run(step.run())
        batch = step.batches["main"]
        metrics = step.metrics()
        return SimpleNamespace(gradients=gradients, moves=moves, metrics=metrics, order=batch.order, rows=batch.rows)

    yield run
    models.reset()


def log_ratio(actor, reference, row: Row) -> torch.Tensor:
    def score(model) -> torch.Tensor:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / row.temperature
        scores = logits.log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
        return (scores * torch.tensor(row.response_mask)).sum()

    with torch.no_grad():
        fixed = score(reference)
    return score(actor) - fixed


def dpo(actor, reference, rows: list[Row]) -> torch.Tensor:
    """The mean loss of the best and the worst answer of each sample."""
    best = {row.uid: row for row in rows if row.calls[0].reward == 1.0}
    worst = {row.uid: row for row in rows if row.calls[0].reward == 0.0}
    pairs = [(best[uid], worst[uid]) for uid in best]
    distances = [log_ratio(actor, reference, a) - log_ratio(actor, reference, b) for a, b in pairs]
    return -logsigmoid(BETA * torch.stack(distances)).mean()


def apart(found, expected) -> float:
    found, expected = (torch.cat([part.flatten() for part in parts]) for parts in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("micro_batch", "temperature"), [(1, 1.0), (2, 0.7), (7, 1.3)], ids=["alone", "two by two", "with padding rows"]
)
def test_the_gradient_is_that_of_dpo(train, models, micro_batch, temperature):
    """... of sampled tokens at the temperature of the rollout. verl's recipe adds what follows the end of an answer,
    and divides only the reference's logits by the temperature."""
    rows = some_rows(temperature)
    actor, reference = models.of("actor"), models.of("ref")
    loss = dpo(actor, reference, rows)
    loss.backward()
    step = train(rows, micro_batch=micro_batch)
    assert step.metrics["policy/main/spin/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert apart(step.gradients[0], [parameter.grad for parameter in actor.parameters()]) < 1e-5
    assert len(step.gradients) == 1 and step.metrics["policy/main/spin/paired_share"] == pytest.approx(2 / 3)
    assert (PAD in step.order) == (micro_batch == 7) and len(step.rows) == 8, "an answer without a pair needs no pass"
    changed = [replace(row, response_mask=[1] * len(row.response_mask)) for row in rows]
    assert apart(train(changed, micro_batch=micro_batch).gradients[0], step.gradients[0]) > 0.01


def test_the_gradient_of_rows_with_several_calls_is_that_of_a_row_per_call(train):
    rows = some_rows()
    later = [
        build_row(row.calls[0].reward, uid=row.uid, episode=row.episode, turn=1, mask=[0, 1, 1], response=[9, 8, 7 + i])
        for i, row in enumerate(rows)
    ]
    separate = [
        *rows,
        *(
            build_row(
                row.calls[0].reward, uid=row.uid, episode=row.episode, turn=1, mask=[1, 1], response=[8, 7 + i],
                prompt=[*row.prompt_ids, *row.response_ids, 9],
            )
            for i, row in enumerate(rows)
        ),
    ]  # fmt: skip
    # the second calls' prompts differ, so they have no pair and are context of nothing
    merged = [merge_rows(pair) for pair in zip(rows, later, strict=True)]
    found, expected = train(merged), train(separate)
    assert apart(found.gradients[0], expected.gradients[0]) < 1e-5
    assert sum(len(row.calls) for row in found.rows) == 8


def test_mini_batches_and_epochs_are_dpo_steps_at_the_weights_of_each(train, models):
    rows, lr, options = some_rows(samples=5), 0.02, {"mini_batches": 2, "epochs": 2}
    step = train(rows, lr=lr, **options)
    actor, reference = models.of("actor"), models.of("ref")
    models.reset()
    actor = models.of("actor")
    dealt = list(deal(step.rows, make_algorithm("spin", **options), seed=3))
    assert len(dealt) == len(step.gradients) == 4
    for number, (members, gradient) in enumerate(zip(dealt, step.gradients, strict=True)):
        loss = dpo(actor, reference, [step.rows[i] for i in members])
        expected = torch.autograd.grad(loss, list(actor.parameters()))
        assert apart(gradient, expected) < (1e-4 if number else 1e-5)  # the weights have been rounded differently
        with torch.no_grad():
            for parameter, part in zip(actor.parameters(), expected, strict=True):
                parameter.sub_(lr * part)
    assert step.moves == [4], "the learning rate changes once in a step"
    assert apart(step.gradients[2], step.gradients[0]) > 0.01


def test_a_sample_is_in_one_mini_batch_of_each_epoch():
    rows = some_rows(samples=7)
    steps = list(deal(rows, make_algorithm("spin", mini_batches=3, epochs=2), seed=1))
    samples = [sorted({rows[i].uid for i in members}) for members in steps]
    for epoch in (samples[:3], samples[3:]):
        assert sorted(uid for uids in epoch for uid in uids) == [f"u{number}" for number in range(7)]
    assert sorted(samples[:3]) != sorted(samples[3:]), "later epochs deal samples out anew"
    assert len(list(deal(rows[:3], make_algorithm("spin", mini_batches=3), seed=1))) == 1


def test_a_reference_is_renewed_when_it_is_due_and_is_then_the_policy(engine, models, tmp_path):
    """In verl's recipe it never changes."""
    worker, rows = engine.worker, some_rows()
    runtime = PolicyRuntime("main", engine.config, SimpleNamespace(), trained=True, reference=Reference(refresh=3))
    runtime.workers = SimpleNamespace(
        **{name: getattr(worker, name) for name in ("compute_log_prob", "compute_ref_log_prob", "renew_reference")},
        _query_dispatch_info=lambda name: [0],
    )

    def log_probs(*, reference: bool) -> torch.Tensor:
        batch = PolicyBatch(rows)
        kernels.prepare(runtime, batch, make_algorithm("spin"))
        if reference:
            kernels.reference_log_probs(runtime, batch)
            return torch.cat(batch.columns["ref_log_prob"])
        return torch.cat(kernels.log_probs(runtime, batch))

    kept = log_probs(reference=True)
    for step in range(1, 7):
        with torch.no_grad():
            for parameter in worker.actor.engine.module.parameters():
                parameter.to_local().mul_(1.01)
        policy = log_probs(reference=False)
        runtime.renew_reference(step)
        found = log_probs(reference=True)
        if step % 3:
            assert torch.equal(found, kept) and not torch.equal(found, policy)
        else:
            assert torch.equal(found, policy) and not torch.equal(found, kept)
        kept = found
    worker.save_reference(str(tmp_path / "reference"))
    models.reset("ref")
    assert not torch.equal(log_probs(reference=True), kept)
    worker.load_reference(str(tmp_path / "reference"))
    assert torch.equal(log_probs(reference=True), kept)
    models.reset()


class Words:
    eos_token_id, decode = 1, None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


def with_texts(texts: dict[str, str]) -> list[Episode]:
    return [Episode(uid, 9, {"extra_info": {"answer": text}}) for uid, text in texts.items()]


def given(rows: list[Row], texts: dict[str, str]) -> list[Row]:
    endpoint = PolicyEndpoint(SimpleNamespace(), Words(), max_model_len=64)  # pyright: ignore[reportArgumentType]
    return list(given_rows(rows, with_texts(texts), make_algorithm("spin", opponent="data"), endpoint))


def test_the_data_s_text_answers_each_prompt_once_and_ends_as_an_answer_does():
    rows = some_rows(temperature=0.7, samples=2)
    found = given(rows, {"u0": "11 12", "u1": "13"})
    assert [(row.uid, row.prompt_ids, row.response_ids) for row in found] == [
        ("u0", rows[0].prompt_ids, [11, 12, 1]),
        ("u1", rows[3].prompt_ids, [13, 1]),
    ]
    assert all(row.given and row.response_mask == [1] * len(row.response_ids) for row in found)
    assert {row.temperature for row in found} == {0.7}
    assert [row.uid for row in given(rows, {"u0": "11 " * 70, "u1": "13"})] == ["u1"], "one is too long"


def test_imitation_has_dpos_gradient_with_the_data_s_text_as_the_better_answer(train, models):
    rows, texts = some_rows(samples=2), {"u0": "11 12", "u1": "13"}
    actor, reference = models.of("actor"), models.of("ref")
    loss = torch.zeros(())
    for gold in given(rows, texts):
        chosen = log_ratio(actor, reference, gold)
        others = [log_ratio(actor, reference, row) for row in rows if row.uid == gold.uid]
        loss = loss - logsigmoid(BETA * (chosen - torch.stack(others))).mean() / len(texts)
    loss.backward()
    step = train(rows, episodes=with_texts(texts), opponent="data")
    assert apart(step.gradients[0], [parameter.grad for parameter in actor.parameters()]) < 1e-5
    assert step.metrics["policy/main/spin/pairs"] == 6 and step.metrics["policy/main/spin/paired_share"] == 1
    assert step.metrics["policy/main/spin/loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_sample_without_the_text_is_refused_before_the_run():
    algorithm = make_algorithm("spin", opponent="data", gold="extra_info.solution")
    samples = [{"prompt": [], "extra_info": {"solution": "42"}}, {"prompt": [], "extra_info": {"answer": "42"}}]
    check_given(samples[:1], algorithm, "data.train_files")
    check_given(samples, make_algorithm("spin"), "data.train_files")
    with pytest.raises(
        UserError, match=r"row 2 has no text at `extra_info.solution` \(it has prompt, extra_info, extra"
    ):
        check_given(samples, algorithm, "data.train_files")


RENEWED = ('"}}, fixed', '"}, reference: {refresh: 2}}, fixed')
"""An edit of the project's workflow; its model is the first policy's."""


def test_a_checkpoint_without_the_reference_that_is_renewed_is_refused(project):
    edit(project / "flow.yaml", "estimator: grpo", "estimator: grpo, kl_loss_coef: 0.1")
    edit(project / "flow.yaml", *RENEWED)
    save(project)
    with pytest.raises(UserError, match="has no reference of policy `main`, which is renewed here"):
        go(project, "trainer.resume_mode=force")
    save(project, references=["main"])
    with pytest.raises(UserError, match=r"main/reference/model_world_size_1_rank_0.pt is missing"):
        launch("dag", overrides_of(project))


@pytest.mark.parametrize("stored", [True, {"refresh": None}])
def test_a_checkpoint_of_an_earlier_version_had_the_reference_that_is_kept(project, stored):
    edit(project / "flow.yaml", "estimator: grpo", "estimator: grpo, kl_loss_coef: 0.1")
    edit(project / "flow.yaml", RENEWED[0], RENEWED[1].replace("{refresh: 2}", "true"))
    items = inputs(project)[2].items
    items["learned"]["workflow"]["policies"]["main"]["reference"] = stored
    items["learned"]["workflow"]["policies"]["fixed"]["reference"] = False if stored is True else None
    save(project, fingerprint=items)
    go(project)
    edit(project / "flow.yaml", "reference: true", "reference: {refresh: 2}")
    save(project, fingerprint=items, references=["main"])
    with pytest.raises(UserError, match=r"policies\.main\.reference\.refresh: was None, now 2"):
        go(project)
