"""python -m gpulayer: the command line."""

import sys

from gpulayer.cli.app import main

sys.exit(main())
