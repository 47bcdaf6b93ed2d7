"""API policies: models behind other providers' servers, with their limits, budgets and caches."""
