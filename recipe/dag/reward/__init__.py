"""Grading and reward shaping."""
