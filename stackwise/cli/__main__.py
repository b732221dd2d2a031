"""The same command as `python -m stackwise.cli`, which is how torchrun starts it."""

import sys

from stackwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
