"""YAML to a frozen, checked Workflow. Imports nothing of ours but errors, and never torch."""
