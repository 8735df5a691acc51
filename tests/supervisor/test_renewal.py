"""Rolling replacement under a real supervisor process, with fake children."""

from __future__ import annotations

import json
import signal
from typing import Any

from meshd.config import Settings
from meshd.control import Role, State
from meshd.log import Log
from meshd.supervisor.child import Child, ChildSpec, Duty
from meshd.supervisor.renewal import Renewal, readers_of_changes
from tests.supervisor.conftest import FakeNode

ALL = (Role.CONTROLLER, Role.LEADER, Role.IO)


def pids(node: FakeNode, *roles: Role) -> set[int]:
    return {row.pid for role in roles for row in node.row_of(role)}


def settled(node: FakeNode, count: int) -> bool:
    rows = [row for role in ALL for row in node.row_of(role)]
    return len(rows) == count and all(row.state is State.READY for row in rows)


def wait_replaced(node: FakeNode, before: set[int], *roles: Role) -> None:
    count = 2 + node.topology.io_processes
    node.wait_until(lambda: settled(node, count) and not pids(node, *roles) & before, "all replaced")


def log_events(node: FakeNode) -> list[str]:
    lines = node.stderr.read_text().splitlines()
    return [
        word.removeprefix("event=") for line in lines for word in line.split() if word.startswith("event=")
    ]


def configure(node: FakeNode, **settings: Any) -> None:
    node.configuration.write_text(json.dumps(settings))
    node.process.send_signal(signal.SIGHUP)


def test_sigusr2_replaces_every_child_and_nobody_retires_before_all_have_loaded(make_node):
    node = make_node(io_processes=2)
    node.wait_ready()
    before, begun = pids(node, *ALL), len(node.events())
    node.process.send_signal(signal.SIGUSR2)
    wait_replaced(node, before, *ALL)
    events = [event for event in node.events()[begun:] if not event.endswith("reopen_logs")]
    assert sorted(events[:4]) == ["controller loaded", "io loaded", "io loaded", "leader loaded"]
    for role in ("controller", "leader"):
        assert events.index(f"{role} hand_over") < events.index(f"{role} take_over")
    ready = [number for number, event in enumerate(events) if event == "io ready"]
    assert ready[0] < events.index("io retire")
    assert max(map(events.index, ("controller ready", "leader ready"))) < events.index("io take_over")


def test_a_second_replacement_uses_the_first_seats_again_and_counts_no_restart(make_node):
    node = make_node()
    node.wait_ready()
    seats = {row.seat for role in ALL for row in node.row_of(role)}
    for turn in range(2):
        before = pids(node, *ALL)
        node.process.send_signal(signal.SIGUSR2)
        wait_replaced(node, before, *ALL)
        assert ({row.seat for role in ALL for row in node.row_of(role)} == seats) is (turn == 1)
    assert all(row.restarts == 0 for role in ALL for row in node.row_of(role))


def test_a_successor_is_restarted_in_its_seat_as_any_child(make_node):
    node = make_node()
    node.wait_ready()
    before = pids(node, *ALL)
    node.process.send_signal(signal.SIGUSR2)
    wait_replaced(node, before, *ALL)
    for role in ALL:
        node.kill_and_wait_for_successor(node.row_of(role)[0])


def test_a_generation_that_cannot_boot_changes_nothing_and_the_next_one_may(make_node):
    node = make_node()
    node.wait_ready()
    before = pids(node, *ALL)
    node.set_mode(Role.IO, "crash")
    node.process.send_signal(signal.SIGUSR2)
    node.wait_until(lambda: "replacement_given_up" in node.stderr.read_text(), "given up")
    node.wait_until(lambda: settled(node, 3), "the old ones alone")
    assert pids(node, *ALL) == before
    assert not any("hand_over" in event or "retire" in event for event in node.events())
    node.set_mode(Role.IO, "serve")
    node.process.send_signal(signal.SIGUSR2)
    wait_replaced(node, before, *ALL)


def test_wishes_during_a_replacement_add_up_to_one_more(make_node):
    node = make_node({Role.IO: "deaf"}, shutdown_grace_period_secs=0.0)  # retires only after 2 s
    node.wait_ready()
    node.process.send_signal(signal.SIGUSR2)
    node.wait_until(lambda: "io retire" in node.events(), "retiring")
    node.set_mode(Role.IO, "serve")
    for _ in range(2):
        node.process.send_signal(signal.SIGUSR2)
    node.wait_until(lambda: node.stderr.read_text().count("replacement_done") == 2, "twice replaced")
    assert node.stderr.read_text().count("replacement_started") == 2
    assert "it did not leave in time" in node.stderr.read_text()  # so long may a grace period be exceeded


def test_sigterm_during_a_replacement_wins(make_node):
    node = make_node()
    node.wait_ready()
    node.set_mode(Role.LEADER, "deaf")
    node.process.send_signal(signal.SIGUSR2)
    node.wait_until(lambda: "leader loaded" in node.events(), "replacing")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    assert not any(node.is_running(pid) for pid in node.pids())


def test_sighup_replaces_only_those_that_read_a_changed_setting(make_node):
    node = make_node()
    node.wait_ready()
    leader, others = pids(node, Role.LEADER), pids(node, Role.IO, Role.CONTROLLER)
    configure(node, client_idle_timeout_secs=5.0)
    wait_replaced(node, others, Role.IO, Role.CONTROLLER)
    assert pids(node, Role.LEADER) == leader
    assert "client_idle_timeout_secs 75.0 -> 5.0" in node.stderr.read_text()
    configure(node, client_idle_timeout_secs=5.0)
    node.wait_until(lambda: "configuration_unchanged" in node.stderr.read_text(), "nothing more to do")


def test_an_invalid_configuration_changes_nothing_and_what_needs_a_restart_is_named(make_node):
    node = make_node()
    node.wait_ready()
    before = pids(node, *ALL)
    node.configuration.write_text("{")
    node.process.send_signal(signal.SIGHUP)
    node.wait_until(lambda: "configuration_refused" in node.stderr.read_text(), "refused")
    configure(node, port=31234)
    node.wait_until(lambda: "port 30000 -> 31234" in node.stderr.read_text(), "named")
    assert pids(node, *ALL) == before


def test_settings_of_a_generation_that_cannot_boot_are_not_kept(make_node):
    node = make_node()
    node.wait_ready()
    node.set_mode(Role.CONTROLLER, "crash")
    configure(node, health_check_interval_secs=5.0)
    node.wait_until(lambda: "replacement_given_up" in node.stderr.read_text(), "given up")
    node.set_mode(Role.CONTROLLER, "serve")
    before = pids(node, Role.CONTROLLER)
    configure(node, health_check_interval_secs=5.0)
    wait_replaced(node, before, Role.CONTROLLER)


def test_a_change_of_the_shutdown_times_is_live(make_node):
    node = make_node(shutdown_delay_secs=900.0, shutdown_grace_period_secs=900.0)
    node.wait_ready()
    before = pids(node, *ALL)
    configure(node, shutdown_delay_secs=0.0)
    node.wait_until(lambda: "shutdown_delay_secs 900.0 -> 0.0" in node.stderr.read_text(), "changed")
    assert pids(node, *ALL) == before
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0


def test_readers_of_changes_are_the_kinds_that_read_a_setting():
    assert readers_of_changes(Settings(), Settings(policy="random")) == {Role.IO, Role.CONTROLLER}
    assert readers_of_changes(Settings(), Settings(health_check_interval_secs=1)) == {Role.CONTROLLER}
    assert readers_of_changes(Settings(), Settings(tokenizer_path="/t")) == set(ALL)
    assert readers_of_changes(Settings(), Settings(port=1, shutdown_delay_secs=1)) == set()


class FakeChildren:
    """One leader and its dropped successor, which has been killed and is not reaped yet."""

    def __init__(self, specs: list[ChildSpec]) -> None:
        self.all = [Child(specs[0], {}), Child(specs[1], {}, Duty.RETIRING)]
        self.started: list[int] = []

    def serving(self, key: object) -> Child:
        return self.all[0]

    def successor(self, key: object) -> Child | None:
        return next((child for child in self.all if child.duty is Duty.SUCCESSOR), None)

    def drop_successor(self, key: object) -> None:
        """It has no process, and so counts as dead."""

    def start_successor(self, spec: ChildSpec, settings: object) -> None:
        self.started.append(spec.seat)
        self.all.append(Child(spec, {}, Duty.SUCCESSOR))


def test_a_queued_replacement_waits_until_the_dropped_ones_of_the_one_before_are_gone():
    specs = [ChildSpec(role=Role.LEADER, index=0, seat=seat, program=()) for seat in (1, 2)]
    children, settings = FakeChildren(specs), Settings()
    log = Log("test", "error", stream_fd=-1)
    renewal = Renewal(children, specs, settings, lambda told: told, 2, log, lambda: 0)  # type: ignore[arg-type]
    renewal.want(settings, everything=True)
    renewal.advance(1)
    assert children.started == [] and renewal.is_pending
    del children.all[1]  # reaped
    renewal.advance(2)
    assert children.started == [2]
