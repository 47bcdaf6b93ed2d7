"""The Ray of a run: started for it, or joined.

Invariant: what Ray would wait for without end (machines, resources, an answer, a token) is looked at first and refused
in one line. A Ray that was there before the run is left running; one that was started for it ends with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.dag.errors import UserError
from recipe.dag.policy.placement import Share
from recipe.dag.policy.process_logs import ProcessLogs
from recipe.dag.policy.resources import Node, check_resources, cpus_needed
from recipe.dag.report.phases import announce

ANSWER_S, RELEASE_S = 10, 15
"""How long a Ray may take to answer, and to free what a run that has just ended held."""
CARRIED = (
    "VERL_PLATFORM",
    "OMP_NUM_THREADS",
    "VERL_USE_EXTERNAL_MODULES",
    "PYTHONPATH",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)
"""Environment variables of this process that every Ray process gets."""
OWN_ONLY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard")
"""Options that Ray takes only where it is started."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Ray to be joined is, and who said so."""

    host_port: str
    source: str

    def __str__(self) -> str:
        return f"Ray at {self.host_port} ({self.source})"


class Cluster:
    """`with Cluster(...) as cluster: cluster.join() ... cluster.start()`; one of the two does something."""

    def __init__(self, config: DictConfig, shares: Sequence[Share], *, platform: str):
        """Raises UserError where no Ray answers at the address to join, and where the run does not fit a Ray of its
        own."""
        self.config, self.shares, self.platform = config, shares, platform
        self.logs = ProcessLogs(Path(config.output_dir) / "logs")
        options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        self.options = {key: value for key, value in options.items() if value is not None}
        self.address = find_address(self.options.pop("address", None))
        if self.address is None:
            self._check_own()
        else:
            for key in OWN_ONLY:
                self.options.pop(key, None)

    def __enter__(self) -> Cluster:
        self.logs.quiet()
        return self

    def __exit__(self, *_exception: object) -> None:
        import ray

        ray.shutdown()
        self.logs.close()

    def pointer(self) -> str:
        """Return where to read what the run's processes printed before they ended; "" where they did not."""
        self.logs.settle()
        return f"what the run's processes printed is in {self.logs.folder}" if self.logs.written else ""

    def join(self) -> None:
        """Connect to a Ray that is there, where one is. Raises UserError where the run does not fit it."""
        if self.address is None:
            return
        announce(f"joining {self.address}")
        self._init(address=self.address.host_port)
        self._check_joined()

    def start(self) -> None:
        """Start a Ray of the run's own, where none was joined."""
        self.logs.open()
        if self.address is None:
            announce("starting Ray")
            self._init(address="local")

    def nodes(self) -> list[str]:
        """Return the ids of the joined Ray's machines that the run's processes may be on; none for a Ray of its own."""
        import ray

        if self.address is None:
            return []
        kind = "CPU" if self.platform == "cpu" else "GPU"
        return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind)]

    def _init(self, address: str) -> None:
        import ray
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        env = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(self.config)))
        env.setdefault("env_vars", {}).update({name: os.environ[name] for name in CARRIED if name in os.environ})
        asked = {key: value for key, value in self.options.get("runtime_env", {}).items() if value is not None}
        env["env_vars"] |= asked.pop("env_vars", {})
        try:
            console = bool(self.options.pop("log_to_driver", False))
            options = {**self.options, "log_to_driver": True, "runtime_env": {**env, **asked}}
            ray.init(address=address, **options)
            self.logs.follow(console=console)
        except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"ray_kwargs.ray_init: {self.address or 'Ray'} did not start: {reason}") from error

    def _check_own(self) -> None:
        import torch

        if self.platform != "cpu" and self.config.trainer.nnodes > 1:
            raise UserError(
                f"trainer.nnodes={self.config.trainer.nnodes} needs a Ray that spans the machines: run `ray start` on "
                "each of them, then set RAY_ADDRESS=HOST:6379 for the run"
            )
        needed = cpus_needed(self.shares, self.platform)
        cpus = self.options.setdefault("num_cpus", max(needed, os.cpu_count() or 1))
        gpus = 0 if self.platform == "cpu" else self.options.get("num_gpus", torch.cuda.device_count())
        check_resources(
            self.shares,
            [Node(cpus, gpus)],
            self.platform,
            where="this machine",
            more_cpus=f"leave ray_kwargs.ray_init.num_cpus={cpus} out, or raise it to {needed}",
        )

    def _check_joined(self) -> None:
        from ray._private.state import available_resources_per_node

        deadline = time.monotonic() + RELEASE_S
        while True:
            free = available_resources_per_node().values()
            nodes = [Node(node.get("CPU", 0), node.get("GPU", 0)) for node in free]
            try:
                return check_resources(
                    self.shares,
                    nodes,
                    self.platform,
                    where=str(self.address),
                    more_cpus="start it with `ray start --num-cpus N`, or let what else runs there end",
                )
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def find_address(asked: str | None) -> Address | None:
    """Return the Ray to join: `RAY_ADDRESS`, `asked` (ray_kwargs.ray_init.address), or the one that `ray start` last
    started on this machine, as Ray itself does. None: the run starts its own.

    Raises UserError for an address at which no Ray answers, or that wants another token.
    """
    from ray._private.services import canonicalize_bootstrap_address

    variable = os.environ.get("RAY_ADDRESS")
    if variable and asked in (None, "auto"):
        source, wanted = f"RAY_ADDRESS={variable}", variable
    else:
        source, wanted = f"ray_kwargs.ray_init.address={asked}" if asked else "the last `ray start` here", asked
    try:
        if wanted is not None and wanted.startswith("ray://"):
            raise ValueError("a client's address; run on a machine of the cluster and pass HOST:6379")
        host_port = canonicalize_bootstrap_address(wanted)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from error
    if host_port is None:
        return None
    reason = _refusal(host_port)
    if reason == "" or (reason.startswith("no Ray answers") and wanted is None):
        # a Ray that ended without `ray stop` leaves its address behind
        return Address(host_port, source) if reason == "" else None
    raise UserError(f"{source}: {reason}")


def _refusal(host_port: str) -> str:
    """Return why the Ray at `host_port` cannot be joined; "" where it can. Leaves token authentication on where it asks
    for it and a token is here."""
    import grpc
    from ray._private.authentication.authentication_token_setup import _enable_token_auth

    error = _ask(host_port)
    wants_token = error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED
    # ray.init looks for a token only where it finds the address itself, and would try without one for 20 s
    if wants_token and "RAY_AUTH_MODE" not in os.environ and _has_token():
        _enable_token_auth()
        error = _ask(host_port)
    if error is None:
        return ""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"the Ray at {host_port} asks for its token: copy ~/.ray/auth_token from the machine on which it was "
            "started, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        )
    return (
        f"no Ray answers at {host_port}: start it with `ray start --head`, or leave the address out to start one here"
    )


def _has_token() -> bool:
    from ray._raylet import AuthenticationTokenLoader

    return AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)


def _ask(host_port: str):
    """Return the gRPC error of the simplest request to a Ray; None where it answers."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with init_grpc_channel(host_port) as channel:
        try:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return error
    return None
