"""The limits that a control group puts on this process: CPU quota and memory, cgroup v1 and v2.

A limit of any ancestor holds too, so every level from our group up to the mount is read and the smallest
wins. In a container without a cgroup namespace ``/proc/self/cgroup`` names a path of the host that is not
mounted here: levels that do not exist are skipped, and the mount's root, the container's group, counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

MOUNT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
_V1_UNLIMITED: Final = 1 << 60  # v1 writes "no limit" as 2^63 rounded down to a page


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the number of CPUs that the group may use on average, None without a quota."""
    quotas = [_v2_quota(level / "cpu.max") for level in _levels(mount, membership, "")]
    quotas += [_v1_quota(level) for level in _levels(mount, membership, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the memory limit of the group in bytes, None without one."""
    limits = [_number(_read(level / "memory.max")) for level in _levels(mount, membership, "")]
    limits += [
        _number(_read(level / "memory.limit_in_bytes")) for level in _levels(mount, membership, "memory")
    ]
    return min((limit for limit in limits if limit is not None and limit < _V1_UNLIMITED), default=None)


def _levels(mount: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Yield our group's directory and its ancestors, for a v1 controller or (empty name) for v2."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        names = [controllers, controller] if controller else [".", "unified"]
        for root in {mount / name for name in names}:
            level = root / path.lstrip("/")
            while level != root:
                yield level
                level = level.parent
            yield root


def _v2_quota(file: Path) -> float | None:
    fields = _read(file).split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _v1_quota(level: Path) -> float | None:
    quota = _number(_read(level / "cpu.cfs_quota_us"))
    period = _number(_read(level / "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _number(text: str) -> int | None:
    return None if text in ("", "max") else int(text)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
