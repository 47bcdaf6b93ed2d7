from __future__ import annotations

import types

import pytest

from examples import hold_gpu_memory


class Card:
    """Of torch.cuda, what the example asks, on cards whose memory is counted."""

    def __init__(self, monkeypatch, free: list[int]):
        self.free, self.index = free, 0
        cuda = types.SimpleNamespace(
            is_available=lambda: bool(free),
            device_count=lambda: len(free),
            device=self.enter,
            mem_get_info=lambda: (self.free[self.index], 0),
        )
        torch = types.SimpleNamespace(cuda=cuda, empty=self.take, uint8=None)
        monkeypatch.setitem(__import__("sys").modules, "torch", torch)

    def enter(self, index):
        self.index = index
        return __import__("contextlib").nullcontext()

    def take(self, count, dtype=None, device=None):
        self.free[self.index] -= count
        return count


def test_each_gpu_keeps_what_is_left_to_the_command(monkeypatch, tmp_path, capsys):
    card = Card(monkeypatch, [84_000_000_000, 50_000_000_000])
    assert hold_gpu_memory.main(["--leave_gb", "32", "bash", "-c", f"echo ran > {tmp_path}/out; exit 3"]) == 3
    assert (tmp_path / "out").read_text() == "ran\n"
    assert all(32e9 <= free < 32e9 + hold_gpu_memory.PIECE for free in card.free)
    assert "holding 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "arguments", "message"),
    [
        ([], ["--leave_gb", "32", "true"], "torch sees no GPU"),
        ([20_000_000_000], ["--leave_gb", "32", "true"], "--leave_gb 32: only 20.0 GB are free"),
        ([20_000_000_000], ["--leave_gb", "32"], "no command to run"),
    ],
)
def test_what_cannot_be_held_is_one_line(free, arguments, message, monkeypatch, capsys):
    Card(monkeypatch, free)
    with pytest.raises(SystemExit) as ended:
        hold_gpu_memory.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
