"""`python -m recipe.dag.cli`: the console script `verl-dag`."""

from recipe.dag.app.cli import main

if __name__ == "__main__":
    main()
