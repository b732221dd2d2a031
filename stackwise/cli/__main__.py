"""Entry point of `python -m stackwise.cli`, the form in which torchrun starts the command."""

import sys

from stackwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
