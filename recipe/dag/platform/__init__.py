"""What lets verl run without a GPU."""
