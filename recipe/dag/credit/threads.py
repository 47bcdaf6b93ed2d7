"""How many threads a computation takes.

Invariant: whoever asked gets back what was set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small tensors: threads would wait for each other longer than they work, and on a busy machine burn ten
    times the work's seconds in it. The result does not depend on the number of cores then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
