"""`python -m humming`: the command line, as `humming` is."""

import sys

from humming.cli import main

sys.exit(main())
