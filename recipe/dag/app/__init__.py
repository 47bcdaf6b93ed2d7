"""Entry points: the console script and its commands, one run, the checks before it, the doctor."""
