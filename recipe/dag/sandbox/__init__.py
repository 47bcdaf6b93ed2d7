"""The embedded SandboxFusion-compatible server."""
