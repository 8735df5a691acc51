"""How a child of the supervisor begins: ``python -m meshd.birth MODULE --manifest-fd N``.

Imports the module of its kind and runs its ``main``. Imports are most of what a start costs, 0.2 s of CPU in
each process. The collector is off meanwhile, which saves a tenth: nothing of a module is ever garbage.

``MODULE --births-fd P N N …`` is a *nursery*: it imports once for several children of a kind, forks one for
each manifest, writes their process ids to ``P``, a line each, and ends. So they become children of the
supervisor, which is its subreaper; each waits for that, because it wants to die with its parent. One that is
not told of by then, since the nursery was killed, ends: its seat is given to another. At that time there is
no thread, event loop or socket that two of them could share, and each closes what is the others'.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from mmap import mmap
from typing import Final

from meshd.control.manifest import Manifest

_ADOPTION_S: Final = 0.001  # between two looks


def main(argv: Sequence[str]) -> int:
    """Be the child whose module ``argv`` begins with; return its exit code."""
    gc.disable()
    module = import_module(argv[0])
    gc.freeze()
    gc.enable()
    words = list(argv[1:])
    if "--births-fd" in words:
        at = words.index("--births-fd")
        births_fd, *manifest_fds = map(int, words[at + 1 :])
        words[at:] = ["--manifest-fd", str(_fork_each(births_fd, manifest_fds))]
    code: int = module.main(words)
    return code


def _fork_each(births_fd: int, manifest_fds: Sequence[int]) -> int:
    """Return in each child, with the descriptor of its manifest; the nursery itself ends here."""
    theirs = {fd: {fd, *Manifest.from_memfd(fd).fds.values()} for fd in manifest_fds}
    nursery = os.getpid()
    told = mmap(-1, len(manifest_fds))  # shared: a byte for each child whose line has been written
    for number, manifest_fd in enumerate(manifest_fds):
        pid = os.fork()
        if pid == 0:
            for foreign in {births_fd}.union(*theirs.values()) - theirs[manifest_fd]:
                os.close(foreign)
            while os.getppid() == nursery:
                time.sleep(_ADOPTION_S)
            if not told[number]:
                os._exit(1)
            return manifest_fd
        os.write(births_fd, f"{pid}\n".encode())
        told[number] = 1
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
