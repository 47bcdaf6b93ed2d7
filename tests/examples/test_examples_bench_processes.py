"""The comparison of numbers of processes, with Ray's own actors."""

from __future__ import annotations


def test_it_measures_each_number_and_compares_the_records(run_example):
    options = ["--episodes", "32", "--wait", "0.001", "--processes", "1", "2", "--rounds", "1"]
    lines = run_example("bench_processes.py", *options).splitlines()
    assert [line.partition(" processes: ")[0] for line in lines if " processes: " in line] == ["1", "2"]
    assert lines[-1] == "the records are the same"
