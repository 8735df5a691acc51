"""As ``newborn.py``, but the nursery is killed once it has forked, before it can tell of the child."""

from __future__ import annotations

import os
import signal

from tests.supervisor import newborn

main = newborn.main
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL))
