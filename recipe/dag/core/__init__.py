"""The foundation of every other package: errors, paths, user code, locks, interruption."""
