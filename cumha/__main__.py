"""``python -m cumha``; the commands are in `cumha.cli`."""

import sys

from cumha.cli import main

if __name__ == "__main__":
    sys.exit(main())
