from __future__ import annotations

from meshd.cgroup import cpu_quota, memory_limit


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def member(tmp_path, *lines):
    file = tmp_path / "membership"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_v2_limits_of_every_level_hold_and_the_smallest_wins(tmp_path):
    write(tmp_path / "a/cpu.max", "150000 100000")
    write(tmp_path / "a/b/cpu.max", "max 100000")
    write(tmp_path / "a/memory.max", "max")
    write(tmp_path / "a/b/memory.max", "1048576")
    membership = member(tmp_path, "0::/a/b")
    assert cpu_quota(tmp_path, membership) == 1.5
    assert memory_limit(tmp_path, membership) == 1 << 20


def test_v1_limits_are_read_under_each_controller(tmp_path):
    write(tmp_path / "cpu,cpuacct/a/cpu.cfs_quota_us", "50000")
    write(tmp_path / "cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    write(tmp_path / "cpu,cpuacct/cpu.cfs_quota_us", "-1")
    write(tmp_path / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    write(tmp_path / "memory/a/memory.limit_in_bytes", "4096000")
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712")
    membership = member(tmp_path, "4:cpu,cpuacct:/a", "3:memory:/a", "1:name=systemd:/a")
    assert cpu_quota(tmp_path, membership) == 0.5
    assert memory_limit(tmp_path, membership) == 4096000


def test_a_path_of_the_host_that_is_not_mounted_leaves_the_limits_of_the_mount_root(tmp_path):
    write(tmp_path / "cpu.max", "200000 100000")
    assert cpu_quota(tmp_path, member(tmp_path, "0::/docker/0123")) == 2


def test_no_limit_and_no_cgroup_at_all_are_none(tmp_path):
    write(tmp_path / "cpu.max", "max 100000")
    write(tmp_path / "memory.max", "max")
    assert cpu_quota(tmp_path, member(tmp_path, "0::/")) is None
    assert memory_limit(tmp_path, member(tmp_path, "0::/")) is None
    assert cpu_quota(tmp_path / "missing", tmp_path / "nothing") is None
