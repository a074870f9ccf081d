"""`python -m parallelformers_ng`, which is `parallelformers-ng`."""

import sys

from parallelformers_ng.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
