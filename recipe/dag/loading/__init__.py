"""Workflow files as users name them: other systems' files are converted, and edits are applied."""
