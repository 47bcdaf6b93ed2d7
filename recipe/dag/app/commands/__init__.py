"""The commands of `verl-dag`, by what the user is doing; `recipe.dag.app.cli` puts them together."""
