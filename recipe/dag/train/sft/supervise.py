"""Fine-tuning in several processes: `python -m recipe.dag.train.sft.supervise NUMBER CONFIG_YAML`.

Invariant: a process that is lost ends the others and is named in one line; tracebacks go to a file of each process.
"""

from __future__ import annotations

import sys
from pathlib import Path

MISTAKE = 2
"""Exit code after a UserError."""


def run(processes: int, file: Path) -> int:
    """Start the processes as torchrun does, wait for them, and return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    module = "recipe.dag.train.sft.process"
    options = ["--standalone", f"--nproc-per-node={processes}", "-m", module, str(file)]
    try:
        torchrun(parse_args(options))
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        # of one second: that which was killed, not one that missed it
        failures = error.failures.items()
        rank, failure = min(failures, key=lambda each: (each[1].timestamp, each[1].exitcode >= 0))
        if failure.exitcode == MISTAKE:  # the process has said what is wrong
            return MISTAKE
        cause = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(
            f"error: process {rank} of {processes} (pid {failure.pid}) ended with {cause}, and the others with it; "
            f"their errors are in {errors_of(file)}. The same command resumes from the last checkpoint",
            file=sys.stderr,
        )
        return 1
    return 0


def errors_of(file: Path, rank: int | str = "*") -> Path:
    """Return the file with a process's errors that are no user's mistakes, beside `file`: the settings."""
    return file.parent / f"rank_{rank}.log"


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), Path(sys.argv[2])))
