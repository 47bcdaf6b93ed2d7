"""The ground that every other package stands on: errors, paths, user code, locks, interruption."""
