"""Start two ranks of a policy with Ray and print the time-outs of their process groups.

python worker_timeouts.py MODEL OUT [settings of the run]
"""

from __future__ import annotations

import sys
from pathlib import Path

WORKFLOW = """\
dag_id: tiny
agents: [{{name: solver, policy: main}}]
policies: {{main: {{model: {{path: {model}}}}}}}
algorithm: {{estimator: grpo}}
nodes:
  - {{id: solve, agent: solver}}
  - {{id: reward, after: solve, reward: score.py:score}}
"""


def timeouts_of_process_groups(_worker=None) -> list[float]:
    """Return the time-out of every process group of this process, in seconds."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    groups = list(c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def run(model: str, out: Path, settings: list[str]) -> None:
    import os

    from recipe.dag.platform.environment import prepare_environment
    from recipe.dag.settings.compose import compose_config

    prepare_environment("cpu")
    import ray
    from verl.single_controller.ray import RayResourcePool

    from recipe.dag.loading.workflow_file import load_workflow
    from recipe.dag.policy.config import policy_config
    from recipe.dag.policy.placement import Pool
    from recipe.dag.policy.policy import PolicyRuntime

    (out / "score.py").write_text("def score(episode): return {}\n")
    (out / "tiny.yaml").write_text(WORKFLOW.format(model=model))
    workflow = load_workflow(out / "tiny.yaml")
    common = [f"workflow={workflow.path}", "data.train_files=none", "data.max_response_length=64"]
    config = policy_config(
        compose_config("dag", [*common, *settings]), workflow, "main", model_path=model, updates=1, platform="cpu"
    )
    names = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES", "PYTHONPATH", "OMP_NUM_THREADS")
    env = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(runtime_env={"env_vars": env})  # joins the one of RAY_ADDRESS
    try:
        pool = Pool(RayResourcePool([2], use_gpu=False, max_colocate_count=1), 1)
        policy = PolicyRuntime("main", config, pool, trained=True)
        policy._start_workers()
        policy.workers.init_model()
        for worker in policy.workers.workers:
            print("TIMEOUTS", *ray.get(worker.__ray_call__.remote(timeouts_of_process_groups)), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
