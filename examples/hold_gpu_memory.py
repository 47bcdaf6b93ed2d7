"""Run a command on a GPU of which only a part is left, as if the card were smaller.

    python examples/hold_gpu_memory.py --leave_gb 32 COMMAND ...

The rest of each visible GPU is held until the command ends, so trainer and servers meet the limit of the smaller card
themselves: what does not fit there is out of memory here, too. GB is 10^9 bytes; about 0.5 GB more go to this process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PIECE = 2**28
"""Bytes that are taken at a time."""


def to_hold(free: int, leave: int) -> int:
    """Return how many bytes to take of a GPU with `free` ones so that `leave` are left. Raises ValueError."""
    if free < leave:
        raise ValueError(f"only {free / 1e9:.1f} GB are free, and {leave / 1e9:g} are to be left")
    return free - leave


def hold(leave: int) -> list:
    """Take what is beyond `leave` bytes of each visible GPU. The memory is held as long as what is returned."""
    import torch

    held = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            torch.empty(1, device="cuda")  # the context of this process counts as taken
            size = to_hold(torch.cuda.mem_get_info()[0], leave)
            held += [torch.empty(PIECE, dtype=torch.uint8, device="cuda") for _ in range(size // PIECE)]
    return held


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leave_gb", type=float, required=True, help="memory of each GPU that the command may use")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("no command to run")
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    try:
        held = hold(int(args.leave_gb * 1e9))
    except ValueError as error:
        parser.error(f"--leave_gb {args.leave_gb:g}: {error}")
    print(f"holding {len(held) * PIECE / 1e9:.1f} GB while {args.command[0]} runs", file=sys.stderr)
    return subprocess.run(args.command).returncode


if __name__ == "__main__":
    sys.exit(main())
