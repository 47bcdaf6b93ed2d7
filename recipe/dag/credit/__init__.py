"""Rewards to advantages: pure functions over torch tensors."""
