"""The Ray cluster of a run: started for the run, or joined.

Invariant: anything that Ray would wait for forever (machines, resources, an answer, a token) is checked first and
refused in one line. A cluster that existed before the run keeps running; one started for the run ends with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from recipe.dag.core.errors import UserError
from recipe.dag.policy.lost import lost_machine, lost_process
from recipe.dag.policy.process_logs import ProcessLogs
from recipe.dag.policy.resources import Node, check_resources, cpus_needed
from recipe.dag.report.phases import announce
from recipe.dag.settings.pools import PoolSpec

ANSWER_S, RELEASE_S = 10, 15
"""Seconds that a cluster may take to answer, and to free the resources of a run that has just ended."""
FORWARDED = (
    "VERL_PLATFORM",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "VERL_USE_EXTERNAL_MODULES",
    "PYTHONPATH",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)
"""Environment variables that every Ray process inherits from this one."""
START_ONLY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard")
"""Options that Ray accepts only when it is started, not when it is joined."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a Ray cluster to join, and the setting that named it."""

    host_port: str
    source: str

    def __str__(self) -> str:
        return f"Ray at {self.host_port} ({self.source})"


class Cluster:
    """`with Cluster(...) as cluster: cluster.join() ... cluster.start()`.

    `join` only imports verl when the run starts its own Ray; `start` then starts it. What Ray prints is kept until
    `logs.open()`.
    """

    def __init__(self, config: DictConfig, pools: Sequence[PoolSpec], *, platform: str):
        """Raise UserError if no Ray answers at the address to join, or if the run does not fit on this machine."""
        self.config, self.pools, self.platform = config, pools, platform
        self.logs = ProcessLogs(Path(config.output_dir) / "logs")
        options = _mapping(config.ray_kwargs.ray_init, resolve=True)
        self.options = {key: value for key, value in options.items() if value is not None}
        self.machines: list[dict[str, Any]] = []
        """Ray's description of those of a joined cluster."""
        self.address = find_address(self.options.pop("address", None))
        if self.address is None:
            self._check_local()
        else:
            for key in START_ONLY:
                self.options.pop(key, None)

    def __enter__(self) -> Cluster:
        self.logs.quiet()
        return self

    def __exit__(self, *_exception: object) -> None:
        import ray

        ray.shutdown()
        self.logs.close()

    def pointer(self) -> str:
        """Return where the output of the run's processes can be read; "" if they printed nothing."""
        self.logs.settle()
        return f"the output of the run's processes is in {self.logs.folder}" if self.logs.written else ""

    def join(self) -> None:
        """Import verl, and connect to the cluster to join, if there is one. Raises UserError if the run does not fit on
        it."""
        import verl.trainer.constants_ppo  # noqa: F401  # here, since other threads import while Ray starts

        if self.address is None:
            return
        announce(f"joining {self.address}")
        self._init(address=self.address.host_port)
        self._check_joined()
        self.machines = self._machines()

    def start(self) -> None:
        """Start Ray for this run, unless a cluster was joined. Blocks the thread for seconds."""
        if self.address is None:
            announce("starting Ray")
            self._init(address="local")

    def nodes(self) -> list[str]:
        """Return the ids of the joined cluster's machines that can take the run's processes; [] if none was joined."""
        return [node["NodeID"] for node in self.machines]

    def lost(self, error: Exception) -> str:
        """Return which machine or process is gone, now that the run has failed with `error`, and what to do; "" if none
        is."""
        import ray
        from ray.exceptions import RayError

        if not ray.is_initialized() or not isinstance(error, RayError | UserError):
            return ""
        # a run may end for another reason long after it has lost a machine, or a process that plays episodes
        reason = f"{error}; " if isinstance(error, UserError) else ""
        if machine := lost_machine(self.machines):
            return f"{reason}the machine {machine} of {self.address} is lost; start Ray on it again, or on another"
        if process := lost_process(error):
            return f"{reason}a process of the run is lost ({process})"
        return ""

    def _machines(self) -> list[dict[str, Any]]:
        import ray

        kind = "CPU" if self.platform == "cpu" else "GPU"
        return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind)]

    def _init(self, address: str) -> None:
        import ray
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        env = _mapping(OmegaConf.create(get_ppo_ray_runtime_env(self.config)))
        # on a joined cluster, processes inherit the environment of `ray start`, not this one
        env.setdefault("env_vars", {}).update({name: os.environ[name] for name in FORWARDED if name in os.environ})
        user_env = {key: value for key, value in self.options.get("runtime_env", {}).items() if value is not None}
        # NCCL_IB_TIMEOUT=22 is a number on the command line, and Ray takes text only
        env["env_vars"] |= {name: str(value) for name, value in user_env.pop("env_vars", {}).items()}
        try:
            console = bool(self.options.pop("log_to_driver", False))
            # the driver writes the processes' lines to the log files, even if the console does not show them
            options = {**self.options, "log_to_driver": True, "runtime_env": {**env, **user_env}}
            ray.init(address=address, **options)
            self.logs.follow(console=console)
        except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"ray_kwargs.ray_init: {self.address or 'Ray'} did not start: {reason}") from error

    def _check_local(self) -> None:
        import torch

        if self.platform != "cpu" and self.config.trainer.nnodes > 1:
            raise UserError(
                f"trainer.nnodes={self.config.trainer.nnodes} needs a Ray that spans the machines: run `ray start` on "
                "each of them, then set RAY_ADDRESS=HOST:6379 for the run"
            )
        needed = cpus_needed(self.pools, self.platform)
        # Ray only counts CPUs, so it may be given more than the machine has
        cpus = self.options.setdefault("num_cpus", max(needed, os.cpu_count() or 1))
        gpus = 0 if self.platform == "cpu" else self.options.get("num_gpus", torch.cuda.device_count())
        check_resources(
            self.pools,
            [Node(cpus, gpus)],
            self.platform,
            where="this machine",
            more_cpus=f"remove ray_kwargs.ray_init.num_cpus={cpus}, or raise it to {needed}",
        )

    def _check_joined(self) -> None:
        from ray._private.state import available_resources_per_node

        deadline = time.monotonic() + RELEASE_S
        while True:
            free = available_resources_per_node().values()
            nodes = [Node(node.get("CPU", 0), node.get("GPU", 0)) for node in free]
            try:
                return check_resources(
                    self.pools,
                    nodes,
                    self.platform,
                    where=str(self.address),
                    more_cpus="start it with `ray start --num-cpus N`, or wait until other jobs on it have ended",
                )
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def _mapping(node: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    # the container of a DictConfig is a dict with the configuration's keys
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=resolve))


def find_address(configured: str | None) -> Address | None:
    """Return the address of the cluster to join; None if the run starts its own.

    As in Ray itself, that is `RAY_ADDRESS`, `configured` (ray_kwargs.ray_init.address), or the cluster that `ray start`
    last started on this machine. Raises UserError if no Ray answers at the address, or if it expects another token.
    """
    from ray._private.services import canonicalize_bootstrap_address

    variable = os.environ.get("RAY_ADDRESS")
    if variable and configured in (None, "auto"):
        source, address = f"RAY_ADDRESS={variable}", variable
    else:
        source = f"ray_kwargs.ray_init.address={configured}" if configured else "the last `ray start` here"
        address = configured
    try:
        if address is not None and address.startswith("ray://"):
            raise ValueError("is a Ray Client address; run on a machine of the cluster and pass HOST:6379")
        host_port = canonicalize_bootstrap_address(address)  # pyright: ignore[reportArgumentType]  # takes None, too
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from error
    if host_port is None:
        return None
    reason = _refusal(host_port)
    if not reason:
        return Address(host_port, source)
    if address is None and reason.startswith("no Ray answers"):
        return None  # a Ray that ended without `ray stop` leaves its address behind
    raise UserError(f"{source}: {reason}")


def _refusal(host_port: str) -> str:
    """Return why the Ray at `host_port` cannot be joined; "" if it can.

    Token authentication stays enabled if the cluster asks for it and this machine has a token.
    """
    import grpc
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    error = _ask(host_port)
    wants_token = error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED
    # ray.init looks for a token only if it finds the address itself, and otherwise retries without one for 20 s
    if wants_token and "RAY_AUTH_MODE" not in os.environ and _has_token():
        _enable_token_auth()
        error = _ask(host_port)
    if error is None:
        return ""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"the Ray at {host_port} requires its token: copy ~/.ray/auth_token from the machine on which it was "
            "started, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        )
    return f"no Ray answers at {host_port}: start it with `ray start --head`, or remove the address to start one here"


def _has_token() -> bool:
    from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  # compiled module

    return AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)


def _ask(host_port: str):
    """Return the gRPC error of the simplest request to a Ray; None if it answers."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with init_grpc_channel(host_port) as channel:  # pyright: ignore[reportGeneralTypeIssues]  # the sync channel
        try:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            request = gcs_service_pb2.GetClusterIdRequest()  # pyright: ignore[reportAttributeAccessIssue]  # generated
            stub.GetClusterId(request, timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error
    return None
