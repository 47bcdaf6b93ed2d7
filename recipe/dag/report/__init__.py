"""Metrics, progress, result files and plots, made from records."""
