"""How rewards become advantages: a module per method, with its options, its traits and where it comes from."""
