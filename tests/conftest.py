"""What tests of several folders share: verl on its CPU platform, a tiny random Qwen2, verl's worker in this process, a
scripted server, the scripts that need a GPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from _pytest.assertion import rewrite
from filelock import FileLock

from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.platform.environment import prepare_environment
from recipe.dag.settings.compose import compose_config
from recipe.dag.types.record import Generation
from recipe.dag.workflow.agent_schema import Critic
from tests.zygote import Zygote

if TYPE_CHECKING:
    from recipe.sandbox.launch import LocalSandbox

pytest_plugins = ["tests.costs"]

prepare_environment("cpu")  # before anything imports verl
# a busy machine is no failure, and CI searches the same examples for the same code
budget = {"deadline": None, "max_examples": 30, "print_blob": True}
hypothesis.settings.register_profile("project", **budget, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("project")

ROOT = Path(__file__).parents[1]
VOCABULARY = 96
WORKFLOW = """\
dag_id: tiny
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: TINY}, reference: true}}
episode: {max_turns: 3}
algorithm: {estimator: grpo, group_by: [uid, agent, turn], scale: none, kl_loss_coef: 0.1, old_log_probs: trainer}
nodes:
  - {id: solve, agent: solver}
  - {id: reward, reward: score.py:score, after: solve}
"""


class ScriptedServer:
    """A policy's server with its tokenizer, one token per character: says `answer(prompt)`, keeps all `prompts`."""

    eos_token_id = 0

    def __init__(self, answer: Callable[[str], str]):
        self.answer, self.prompts = answer, []

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i)

    def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
        text = "".join(message["content"] for message in messages)
        return {"input_ids": self.encode(text)} if tokenize and return_dict else self.encode(text) if tokenize else text

    async def generate(self, request_id, prompt_ids, sampling):
        self.prompts.append(self.decode(prompt_ids))
        ids = [*self.encode(self.answer(self.prompts[-1])), 0]
        return Generation(ids, [-0.5] * len(ids), "stop")


@pytest.fixture(scope="session")
def scripted_server() -> type[ScriptedServer]:
    return ScriptedServer


def pytest_configure(config: pytest.Config) -> None:
    """Fork the processes that will run tests. Their modules' assertions are rewritten while the zygote starts: each
    process would do it anew."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        with ThreadPoolExecutor() as pool:
            starting = pool.submit(Zygote, Path(_shared(config)), os.getpid())
            _rewrite_assertions(config)
        config.option.tx = [f"popen//python={starting.result().python}"] * len(config.option.tx)


def _rewrite_assertions(config: pytest.Config) -> None:
    """Write the modules that pytest would write when it imports the files."""
    for argument in config.args:
        path = Path(argument.partition("::")[0])
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            written = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
            if file.match("test_*.py") and rewrite._read_pyc(file, written) is None:
                rewrite.try_makedirs(written.parent)
                stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, written)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process that runs tests which folder all of them share."""
    node.workerinput["shared"] = _shared(node.config), os.getpid()


def pytest_unconfigure(config: pytest.Config) -> None:
    if SHARED in config.stash:
        Zygote.end(Path(config.stash[SHARED]))


SHARED = pytest.StashKey[str]()


def _shared(config: pytest.Config) -> str:
    if SHARED not in config.stash:
        config.stash[SHARED] = tempfile.mkdtemp(prefix="zygote")  # short, because sockets are made in it
    return config.stash[SHARED]


@pytest.fixture(scope="session")
def zygote(request) -> Zygote:
    """A Python for runs and their workers that starts quickly."""
    folder, owner = getattr(request.config, "workerinput", {}).get("shared") or (_shared(request.config), os.getpid())
    zygote = Zygote(Path(folder), owner)
    request.config.pluginmanager.get_plugin("costs of tests").zygote = zygote.folder
    return zygote


@pytest.fixture(scope="session")
def joined_ray(zygote) -> dict[str, str]:
    """The environment of runs that join a Ray, whose workers start quickly."""
    address = zygote.joined_ray(PYTHONPATH=str(ROOT), RAY_AUTH_MODE="disabled")
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, worker_id) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once(name, make)`: a folder that `make` has filled, in the first of the processes that run tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def made_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / f"shared_{name}", shared / f"shared_{name}.done"
        with FileLock(shared / f"shared_{name}.lock"):
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made_once


class GpuScript:
    """Runs scripts that need a GPU on a PATH with what they need before they start Python, and no nvidia-smi."""

    def __init__(self, folder: Path, python: str):
        self.folder, self.python = folder, python
        for name in ("bash", "dirname", "grep", "sed", "tr"):
            (folder / name).symlink_to(shutil.which(name))

    def pretend_there_is_a_gpu(self) -> None:
        smi = self.folder / "nvidia-smi"
        smi.write_text(f"#!{shutil.which('bash')}\necho 'GPU 0: a card'\n")
        smi.chmod(0o755)

    def run(self, script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.folder), "HOME": os.environ.get("HOME", "/"), "PYTHON": self.python, **env}
        command = [shutil.which("bash"), str(script), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")

    def expect_refusal(self, script: Path, what: str, **env: str) -> None:
        """One line that says `what`, and points to the tiny run of the script's recipe."""
        done = self.run(script, **env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and what in done.stderr
        assert f"bash recipe/{script.parent.name}/run_tiny_cpu.sh" in done.stderr


@pytest.fixture
def gpu_script(tmp_path, zygote) -> GpuScript:
    return GpuScript(tmp_path, str(zygote.python))


@pytest.fixture(scope="session")
def missing_for_full_isolation() -> str:
    """Why the sandbox cannot isolate fully on this machine; "" where it can."""
    from recipe.sandbox import engines
    from recipe.sandbox.outcome import Unavailable

    async def attempt(root: str) -> None:
        engine = await engines.start("full", False, root=Path(root))
        await engine.close()

    with tempfile.TemporaryDirectory() as root:
        try:
            asyncio.run(attempt(root))
        except Unavailable as error:
            return str(error)
    return ""


@pytest.fixture(scope="session")
def full_isolation(missing_for_full_isolation) -> None:
    """For tests of what only full isolation does."""
    if missing_for_full_isolation:
        pytest.skip(f"full isolation: {missing_for_full_isolation}")


@pytest.fixture(scope="session")
def sandbox_level(missing_for_full_isolation) -> dict:
    """LocalSandbox's keyword arguments for the best isolation that this machine has."""
    if missing_for_full_isolation:
        return {"isolation": "rlimits", "accept_unsandboxed": True}
    return {"isolation": "full"}


@pytest.fixture(scope="session")
def local(sandbox_level) -> Iterator[LocalSandbox]:
    """One server for all tests that do not change it."""
    from recipe.sandbox.launch import LocalSandbox

    sandbox = LocalSandbox(max_concurrent=8, **sandbox_level)
    asyncio.run(sandbox.start())
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with random weights (far from uniform, so that every position matters) and a word tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.set_num_threads(1)  # small tensors: more threads only wait for each other
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(tiny_model, tmp_path_factory) -> SimpleNamespace:
    """verl's FSDP2 worker over `tiny_model`, actor, reference and critic, world size 1, in this process: `.worker`,
    with the `.config` and `.workflow` that this package makes for it."""
    import torch

    from recipe.dag.policy.config import policy_config
    from recipe.dag.policy.worker import PolicyWorker

    folder = tmp_path_factory.mktemp("engine")
    (folder / "score.py").write_text("def score(episode): return {}\n")
    (folder / "tiny.yaml").write_text(WORKFLOW.replace("TINY", str(tiny_model)))
    workflow = load_workflow(folder / "tiny.yaml")
    policy = workflow.policies["main"].model_copy(update={"critic": Critic(cliprange_value=0.2)})
    workflow = workflow.model_copy(update={"policies": {"main": policy}})
    run = compose_config("dag", [f"workflow={workflow.path}", "data.train_files=none", "data.max_response_length=64"])
    paths = {"model_path": str(tiny_model), "critic_path": str(tiny_model)}
    config = policy_config(run, workflow, "main", **paths, updates=100, platform="cpu")
    address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    before = dict(os.environ)
    os.environ.update(address)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        worker = PolicyWorker(config.actor_rollout_ref, role="actor_rollout_ref", critic=config.critic)
        worker.init_model()
        yield SimpleNamespace(worker=worker, config=config, workflow=workflow)
    finally:
        torch.distributed.destroy_process_group()
        for name in address:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@pytest.fixture
def one_thread():
    """For tiny tensors: threads that wait for a busy core would cost a hundred times the work."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


GSM8K_CARD = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture
def gsm8k(tmp_path, monkeypatch) -> Path:
    """A folder laid out like openai/gsm8k on the hub, with 8 training problems and 4 test problems."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "gsm8k"
    for configuration, split, count in (("main", "train", 8), ("main", "test", 4), ("socratic", "train", 2)):
        rows = [
            {
                "question": f"{configuration} {split}: Ann sells {n} clips, then 1000 more. How many?",
                "answer": f"First she sells {n}.\nThen {n}+1000=<<{n}+1000={1000 + n}>>{1000 + n} clips.\n#### 1,00{n}",
            }
            for n in range(count)
        ]
        (folder / configuration).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / configuration / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(GSM8K_CARD)
    return folder


@pytest.fixture
def hub(monkeypatch):
    """`hub(rows)`: a hub whose data sets have `rows(path, name, split)`; returns the list of what it is asked for."""

    def install(rows) -> list[tuple]:
        asked: list[tuple] = []

        def load_dataset(path, name=None, *, split):
            asked.append((path, name, split))
            found = rows(path, name, split)
            return SimpleNamespace(to_list=lambda: found)

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return asked

    return install
