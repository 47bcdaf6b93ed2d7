"""Coaching: an agent that is not trained scores the calls of other agents, and its scores become their rewards."""
