"""A server for untrusted programs with SandboxFusion's HTTP API."""
