"""API policies: models behind servers with OpenAI's interface."""
