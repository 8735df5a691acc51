"""``python -m meshd.backend``."""

import sys

from meshd.backend.process import main

sys.exit(main(sys.argv[1:]))
