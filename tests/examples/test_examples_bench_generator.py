"""The benchmark runs and prints a ratio; what the ratio is depends on the machine."""

import re


def test_both_generators_make_every_token_that_was_asked_for(run_example):
    printed = run_example("bench_generator.py", "--requests", "4", "--tokens", "3", "--rounds", "1")
    assert re.search(r"^ratio \d+\.\d\d$", printed, re.M)
