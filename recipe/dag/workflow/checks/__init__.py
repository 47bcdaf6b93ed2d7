"""Checks of a draft: every mistake at once, each at its place. `whole` runs them all."""
