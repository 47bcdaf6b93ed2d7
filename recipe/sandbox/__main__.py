import sys

from recipe.sandbox.command import serve
from recipe.sandbox.errors import CannotStart

if __name__ == "__main__":
    try:
        serve(sys.argv[1:], "python -m recipe.sandbox")
    except CannotStart as error:
        print(error, file=sys.stderr)
        sys.exit(2)
