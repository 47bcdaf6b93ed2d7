"""`python -m recipe.dag.main`: train or evaluate a workflow, as `recipe.dag.app.main` does."""

import sys

from recipe.dag.app.main import main

if __name__ == "__main__":
    sys.exit(main())
