"""One policy on verl: configuration, placement, workers, servers, weight sync, checkpoints."""
