"""The commands of `verl-dag`, by what the user is doing; `recipe.dag.cli` puts them together."""
