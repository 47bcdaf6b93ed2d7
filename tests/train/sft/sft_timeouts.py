"""Build the trainer of supervised fine-tuning in one process, and print the time-outs of its process groups.

python sft_timeouts.py SETTING...
"""

from __future__ import annotations

import json
import sys

from recipe.dag.train.sft import launch as sft
from recipe.dag.train.sft import process as sft_process
from recipe.dag.train.sft.compose import compose_sft


def show_timeouts(*_fit_takes: object) -> int:
    """Print the time-out of every process group of this process, in seconds."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    backends = [group._get_backend(torch.device("cpu")) for group in list(c10d._world.pg_map)]
    print(json.dumps([backend.options._timeout.total_seconds() for backend in backends]))
    return 0


def add_group(trainer_class) -> None:
    """Make another group while the engine is built, as it does for a mesh over some of the processes."""
    import torch

    original = trainer_class._init_engine

    def build(self) -> None:
        original(self)
        torch.distributed.new_group([0])

    trainer_class._init_engine = build


if __name__ == "__main__":
    config = compose_sft(sys.argv[1:])
    sft._choose_devices(config)
    inputs = sft_process.check(config, processes=1)
    assert inputs is not None
    from verl.trainer.sft_trainer import SFTTrainer

    add_group(SFTTrainer)
    sft_process._fit = show_timeouts
    sys.exit(sft_process.train(config, inputs))
