"""The Ray of a run, without starting one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from recipe.dag.core.errors import UserError
from recipe.dag.policy import cluster
from recipe.dag.policy.cluster import Cluster, find_address
from recipe.dag.report.phases import end_phase
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.pools import PoolSpec
from tests.zygote import hold_port

POOLS = (PoolSpec((2,), ("main",)),)


@pytest.fixture(autouse=True)
def no_ray_of_this_machine(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    yield
    end_phase()


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which nothing answers."""
    with hold_port() as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def token_server():
    """The part of a Ray's head that every joining process asks first; it wants a token."""

    class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
        def GetClusterId(self, request, context):
            if ("authorization", "Bearer secret") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return gcs_service_pb2.GetClusterIdReply()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(Head(), server)
    port = server.add_insecure_port("0.0.0.0:0")  # Ray asks by the address of this machine
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def config(*overrides: str):
    return compose_config("dag", ["workflow=w", *overrides])


def test_without_an_address_a_run_has_a_ray_of_its_own():
    assert find_address(None) is None
    assert find_address("local") is None


def test_an_address_without_a_ray_is_refused_at_once(monkeypatch, silent):
    with pytest.raises(UserError, match=f"ray_init.address={silent}: no Ray answers at .*ray start --head"):
        find_address(silent)
    monkeypatch.setenv("RAY_ADDRESS", silent)
    with pytest.raises(UserError, match=f"^RAY_ADDRESS={silent}: no Ray answers"):
        find_address(None)
    with pytest.raises(UserError, match="is a Ray Client address"):
        find_address("ray://somewhere:10001")


def test_the_address_that_a_dead_ray_left_behind_is_passed_over(monkeypatch, silent):
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", lambda _: silent)
    assert find_address(None) is None


def test_a_ray_that_wants_a_token_is_refused_at_once_where_there_is_none(token_server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cluster, "_has_token", lambda: False)
    with pytest.raises(UserError, match="requires its token: copy ~/.ray/auth_token"):
        find_address(token_server)


def test_options_of_a_ray_of_ones_own_are_not_passed_to_a_joined_one(monkeypatch):
    monkeypatch.setattr(cluster, "_refusal", lambda host_port: "")
    settings = config("ray_kwargs.ray_init.num_cpus=3", "ray_kwargs.ray_init.address=10.0.0.1:6379")
    joined = Cluster(settings, POOLS, platform="cpu")
    assert joined.address.host_port == "10.0.0.1:6379"
    assert joined.options.keys() == {"runtime_env", "log_to_driver"}


def test_a_ray_of_its_own_gets_the_cpus_that_the_run_asks_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert Cluster(config(), POOLS, platform="cuda").options["num_cpus"] == 7
    assert Cluster(config(), POOLS, platform="cpu").options["num_cpus"] == 4


def test_what_a_machine_lacks_is_refused_before_ray_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="needs 2 GPUs .* this machine has 1 free"):
        Cluster(config(), POOLS, platform="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="remove ray_kwargs.ray_init.num_cpus=3, or raise it to 7"):
        Cluster(config("ray_kwargs.ray_init.num_cpus=3"), POOLS, platform="cuda")
    with pytest.raises(UserError, match="trainer.nnodes=2 needs a Ray that spans the machines"):
        Cluster(config("trainer.nnodes=2"), POOLS, platform="cuda")


def test_environment_variables_that_the_user_adds_leave_the_runs_own_in_place(monkeypatch, tmp_path):
    started = {}
    monkeypatch.setattr("ray.init", lambda **options: started.update(options))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("PYTHONPATH", "/code")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    asked = "ray_kwargs.ray_init.runtime_env.env_vars"
    asks = [f"+{asked}.MINE=here", f"+{asked}.NCCL_IB_TIMEOUT=22", f"+{asked}.VERL_PLATFORM=other"]
    asks.append(f"output_dir={tmp_path}")
    Cluster(config(*asks), POOLS, platform="cpu").start()
    variables = started["runtime_env"]["env_vars"]
    assert variables["MINE"] == "here" and variables["PYTHONPATH"] == "/code"
    assert variables["NCCL_IB_TIMEOUT"] == "22", "Ray takes text only"
    assert variables["VERL_PLATFORM"] == "other", "what the user says wins"
    assert started["log_to_driver"] is True, "the lines go to files"


def test_an_error_points_to_what_the_processes_printed_where_they_printed_anything(tmp_path):
    made = Cluster(config(f"output_dir={tmp_path}"), POOLS, platform="cpu")
    with made:
        assert made.pointer() == "" and not (tmp_path / "logs").exists()
        made.logs.open()
        assert made.pointer() == ""
        made.logs.take({"pid": 7, "actor_name": "server", "ip": "a", "localhost": "a", "lines": ["out of memory"]})
        assert made.pointer() == f"the output of the run's processes is in {tmp_path}/logs"
