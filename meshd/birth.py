"""How a child of the supervisor begins: ``python -m meshd.birth MODULE --manifest-fd N``.

Imports the module of its kind and runs its ``main``. Imports are most of what a start costs, 0.2 s of CPU in
each process. The collector is off meanwhile, which saves a tenth: nothing of a module is ever garbage.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> int:
    """Be the child whose module ``argv`` begins with; return its exit code."""
    gc.disable()
    module = import_module(argv[0])
    gc.freeze()
    gc.enable()
    code: int = module.main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
