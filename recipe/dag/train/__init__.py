"""Rows to TensorDict, the nodes' kernels, the step scheduler, the training loop."""
