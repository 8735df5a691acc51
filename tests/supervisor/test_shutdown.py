"""The order of the end, as a conversation: time and the living in, acts out."""

from __future__ import annotations

from meshd.supervisor.shutdown import Act, Patience, Phase, Shutdown

SECOND = 1_000_000_000
PATIENT = Patience(delay_s=5, grace_s=180)


def acts_at(shutdown: Shutdown, seconds: float, *, has_io: bool = True, has_any: bool = True) -> list[Act]:
    """All acts until it rests."""
    acts: list[Act] = []
    while True:
        before = shutdown.phase
        acts += shutdown.next_acts(int(seconds * SECOND), has_io=has_io, has_any=has_any)
        if shutdown.phase is before:
            return acts


def test_nothing_happens_while_running():
    shutdown = Shutdown()
    assert acts_at(shutdown, 1e6, has_io=False, has_any=False) == []
    assert shutdown.phase is Phase.RUNNING


def test_the_whole_way_of_a_patient_end():
    shutdown = Shutdown()
    assert shutdown.signal(0, PATIENT) == [Act.ANNOUNCE]
    assert acts_at(shutdown, 4.9) == []
    assert acts_at(shutdown, 5) == [Act.DRAIN_IO]
    assert acts_at(shutdown, 100) == []
    assert acts_at(shutdown, 101, has_io=False) == [Act.KILL_IO, Act.CLOSE_REST]
    assert acts_at(shutdown, 101.1, has_io=False) == []
    assert acts_at(shutdown, 101.2, has_io=False, has_any=False) == [Act.KILL_ALL]
    assert shutdown.phase is Phase.ENDED


def test_deaths_during_the_delay_do_not_shorten_it():
    shutdown = Shutdown()
    shutdown.signal(0, PATIENT)
    assert acts_at(shutdown, 3, has_io=False) == []


def test_io_processes_that_outstay_the_grace_period_are_killed():
    shutdown = Shutdown()
    shutdown.signal(0, PATIENT)
    acts_at(shutdown, 5)
    assert acts_at(shutdown, 180.9) == []
    assert acts_at(shutdown, 181) == [Act.KILL_IO, Act.CLOSE_REST]


def test_it_ends_within_two_seconds_past_the_grace_period_whatever_lives():
    shutdown = Shutdown()
    shutdown.signal(0, PATIENT)
    for tenths in range(1830):
        acts_at(shutdown, tenths / 10)
    assert acts_at(shutdown, 182) == [] and shutdown.phase is Phase.ENDED


def test_a_second_signal_cuts_and_ends_within_three_seconds_whatever_lives():
    shutdown = Shutdown()
    shutdown.signal(0, PATIENT)
    acts_at(shutdown, 1)
    assert shutdown.signal(2 * SECOND, PATIENT) == []
    assert acts_at(shutdown, 2) == [Act.DRAIN_IO, Act.CUT_IO]
    for tenths in range(20, 50):
        acts_at(shutdown, tenths / 10)
    assert acts_at(shutdown, 5) == [] and shutdown.phase is Phase.ENDED


def test_a_hurried_end_gives_requests_two_seconds_and_is_over_after_three():
    shutdown = Shutdown()
    shutdown.signal(0, Patience.hurried())
    assert acts_at(shutdown, 0) == [Act.DRAIN_IO]
    assert acts_at(shutdown, 2) == []
    for tenths in range(20, 30):
        acts_at(shutdown, tenths / 10)
    assert acts_at(shutdown, 3) == [] and shutdown.phase is Phase.ENDED


def test_the_delay_never_exceeds_the_grace_period():
    shutdown = Shutdown()
    shutdown.signal(0, Patience(delay_s=5, grace_s=1))
    assert acts_at(shutdown, 1) == [Act.DRAIN_IO]


def test_an_aborted_start_kills_everyone_at_once():
    shutdown = Shutdown()
    shutdown.abort(0)
    assert acts_at(shutdown, 0) == [Act.KILL_ALL]
    assert acts_at(shutdown, 0.1, has_io=False, has_any=False) == []
    assert shutdown.phase is Phase.ENDED
