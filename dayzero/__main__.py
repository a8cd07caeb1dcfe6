"""``python -m dayzero`` is ``dayzero``."""

import sys

from dayzero.cli import main

sys.exit(main())
