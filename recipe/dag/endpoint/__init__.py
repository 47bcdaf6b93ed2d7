"""A policy's model as agents reach it: its client, its chat template, and text as token ids."""
