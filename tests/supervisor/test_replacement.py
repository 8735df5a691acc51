"""Rolling replacements as conversations: what is seen, what is to be done."""

from __future__ import annotations

from meshd.control import Role
from meshd.supervisor.replacement import (
    BOOT_LIMIT_NS,
    SETTLE_LIMIT_NS,
    Act,
    Key,
    Progress,
    Replacement,
    Sight,
)

CTL, LEAD, IO0, IO1 = (Role.CONTROLLER, 0), (Role.LEADER, 0), (Role.IO, 0), (Role.IO, 1)
KEYS = (CTL, LEAD, IO0, IO1)
LOADED, READY, DEAD = Progress.LOADED, Progress.READY, Progress.DEAD


class Play:
    """One replacement and what is seen of it; ``acts`` returns what is to be done, by key."""

    def __init__(self, *keys: Key, most_booting: int = 8) -> None:
        self.replacement = Replacement(keys or KEYS, most_booting, 0)
        self.sights = {key: Sight(Progress.BOOTING) for key in self.replacement.keys}

    def see(self, progress: Progress, *keys: Key, gone: bool = False) -> None:
        self.sights |= {key: Sight(progress, is_predecessor_gone=gone) for key in keys}

    def acts(self, now_ns: int = 0) -> dict[Key, Act]:
        return {key: act for act, key in self.replacement.next_acts(now_ns, self.sights)}

    def commit(self) -> dict[Key, Act]:
        self.acts()
        self.see(LOADED, *self.replacement.keys)
        return self.acts()


def test_no_old_process_leaves_before_all_new_ones_have_loaded():
    play = Play()
    assert play.acts() == dict.fromkeys(KEYS, Act.START)
    play.see(LOADED, CTL, LEAD, IO0)
    assert play.acts() == {}
    assert not play.replacement.is_committed
    play.see(LOADED, IO1)
    assert play.acts() == {CTL: Act.HAND_OVER, LEAD: Act.HAND_OVER}
    assert play.replacement.is_committed


def test_only_so_many_boot_at_a_time():
    play = Play(most_booting=2)
    assert play.acts() == {CTL: Act.START, LEAD: Act.START}
    assert play.acts() == {}
    play.see(LOADED, LEAD)
    assert play.acts() == {IO0: Act.START}


def test_a_single_writer_takes_over_when_its_predecessor_has_ended():
    play = Play()
    play.commit()
    assert play.acts() == {}
    play.see(LOADED, LEAD, gone=True)
    assert play.acts() == {LEAD: Act.TAKE_OVER}


def test_io_processes_begin_when_the_others_are_ready_and_the_old_ones_retire_one_by_one():
    play = Play()
    play.commit()
    play.see(LOADED, CTL, LEAD, gone=True)
    play.acts()
    play.see(READY, CTL, gone=True)
    assert play.acts() == {}
    play.see(READY, LEAD, gone=True)
    assert play.acts() == {IO0: Act.TAKE_OVER, IO1: Act.TAKE_OVER}
    play.see(READY, IO1)
    assert play.acts() == {IO1: Act.RETIRE}
    assert not play.replacement.has_switched
    play.see(READY, IO0)
    assert play.acts() == {IO0: Act.RETIRE}
    assert play.replacement.has_switched and not play.replacement.is_over
    play.see(READY, IO0, IO1, gone=True)
    assert play.acts() == {}
    assert play.replacement.is_over and play.replacement.lost == []


def test_io_processes_do_not_wait_for_ever_for_a_leader():
    play = Play()
    play.commit()
    assert play.acts(SETTLE_LIMIT_NS) == {}
    assert play.acts(SETTLE_LIMIT_NS + 1) == {IO0: Act.TAKE_OVER, IO1: Act.TAKE_OVER}


def test_a_successor_that_cannot_boot_ends_the_replacement_and_all_old_ones_stay():
    play = Play(most_booting=3)
    play.acts()
    play.see(LOADED, CTL)
    play.see(DEAD, LEAD)
    assert play.acts() == {CTL: Act.DROP, LEAD: Act.DROP, IO0: Act.DROP}
    assert play.replacement.is_over and play.replacement.is_given_up
    assert play.replacement.lost == [LEAD]
    assert play.acts() == {}


def test_a_successor_that_dies_after_it_has_loaded_ends_it_too():
    play = Play(most_booting=1)
    play.acts()
    play.see(LOADED, CTL)
    play.acts()
    play.see(DEAD, CTL)
    assert play.acts() == {CTL: Act.DROP, LEAD: Act.DROP}


def test_a_generation_that_does_not_load_in_time_is_given_up():
    play = Play(IO0)
    play.acts()
    assert play.acts(BOOT_LIMIT_NS) == {}
    assert play.acts(BOOT_LIMIT_NS + 1) == {IO0: Act.DROP}
    assert play.replacement.is_given_up


def test_an_io_process_lost_after_the_point_of_no_return_leaves_the_old_one_in_place():
    play = Play(IO0, IO1)
    assert play.commit() == {IO0: Act.TAKE_OVER, IO1: Act.TAKE_OVER}
    play.see(DEAD, IO0)
    play.see(READY, IO1)
    assert play.acts() == {IO0: Act.DROP, IO1: Act.RETIRE}
    play.see(READY, IO1, gone=True)
    play.acts()
    assert play.replacement.is_over and not play.replacement.is_given_up
    assert play.replacement.lost == [IO0]


def test_a_controller_that_dies_while_it_takes_over_is_waited_for_as_any_child():
    play = Play(CTL)
    play.commit()
    play.see(DEAD, CTL, gone=True)
    assert play.acts() == {CTL: Act.TAKE_OVER}
    assert play.acts() == {}
    play.see(READY, CTL, gone=True)
    play.acts()
    assert play.replacement.is_over and play.replacement.lost == []


def test_a_shutdown_before_the_point_of_no_return_drops_all_successors():
    play = Play()
    play.acts()
    assert dict(map(reversed, play.replacement.stop())) == dict.fromkeys(KEYS, Act.DROP)
    assert play.replacement.is_over


def test_a_shutdown_after_it_still_lets_single_writers_take_over():
    play = Play()
    play.commit()
    assert dict(map(reversed, play.replacement.stop())) == {IO0: Act.DROP, IO1: Act.DROP}
    play.see(LOADED, CTL, LEAD, gone=True)
    assert play.acts() == {CTL: Act.TAKE_OVER, LEAD: Act.TAKE_OVER}
