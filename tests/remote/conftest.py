"""The world of scripted episodes (tests/episode/conftest.py)."""

from tests.episode.conftest import no_backoff, world

__all__ = ["no_backoff", "world"]
