"""`python models/recipe`: the command line, see README.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if not __package__:  # started by its path: what is beside this file is not to be found under top-level names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads ruin training on cores that others use too

from recipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
