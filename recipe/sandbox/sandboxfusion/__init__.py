"""The routes of SandboxFusion that no workflow of this project uses; its other clients do."""
