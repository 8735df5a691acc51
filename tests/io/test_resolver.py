"""The resolver: lookups in threads that the test holds up at will."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
import uvloop

from meshd.io.resolver import MAX_LOOKUPS, MAX_NAMES, NameNotResolved, Resolver, is_literal, look_up
from tests.fakes.transport import FakeClock


class Names:
    """Answers from ``table``; a name in ``held`` is answered only when its event is set."""

    def __init__(self) -> None:
        self.table: dict[str, Sequence[str] | Exception] = {}
        self.held: dict[str, threading.Event] = {}
        self.asked: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        self.threads.add(threading.get_ident())
        if name in self.held:
            assert self.held[name].wait(10)
        found = self.table.get(name, OSError("unknown"))
        if isinstance(found, Exception):
            raise found
        return found

    def hold(self, *names: str) -> None:
        self.held.update({name: threading.Event() for name in names})

    def let_go(self) -> None:
        for event in self.held.values():
            event.set()


@pytest.fixture
def names() -> Iterator[Names]:
    it = Names()
    yield it
    it.let_go()


def play(names: Names, run: Callable[[Resolver, FakeClock], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = FakeClock()
        await run(Resolver(asyncio.get_running_loop(), lookup=names, clock=clock), clock)

    uvloop.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def error_of(resolver: Resolver, name: str) -> str:
    with pytest.raises(NameNotResolved) as caught:
        await resolver.addresses(name)
    return str(caught.value)


def test_answer_is_kept_10_s_and_then_the_name_is_looked_up_again(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        names.table["a"] = ["10.0.0.1", "::1", "10.0.0.1"]
        assert await resolver.addresses("a") == ("10.0.0.1", "::1")
        names.table["a"] = ["10.0.0.2"]
        clock.advance(9.9)
        assert await resolver.addresses("a") == ("10.0.0.1", "::1") and names.asked == ["a"]
        clock.advance(0.1)
        assert await resolver.addresses("a") == ("10.0.0.2",) == resolver.known("a")

    play(names, run)


def test_failure_is_kept_1_s(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        assert await error_of(resolver, "a") == "a: unknown"
        names.table["a"] = ["10.0.0.1"]
        clock.advance(0.9)
        assert await error_of(resolver, "a") == "a: unknown" and names.asked == ["a"]
        clock.advance(0.1)
        assert await resolver.addresses("a") == ("10.0.0.1",)
        # A failure later on does not forget where the open connections go.
        names.table["a"] = OSError("gone")
        clock.advance(10)
        assert await error_of(resolver, "a") == "a: gone" and resolver.known("a") == ("10.0.0.1",)

    play(names, run)


@pytest.mark.parametrize("found", [[], ValueError("label too long"), OSError()])
def test_every_way_to_find_nothing_is_one_error(names, found):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        names.table["a"] = found
        assert (await error_of(resolver, "a")).startswith("a: ")

    play(names, run)


def test_all_who_wait_for_a_name_share_one_lookup_and_one_who_leaves_ends_it_for_nobody(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        names.table["a"] = ["10.0.0.1"]
        names.hold("a")
        tasks = [asyncio.ensure_future(resolver.addresses("a")) for _ in range(20)]
        await until(lambda: names.asked == ["a"])
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        resolver.refresh("a")
        names.let_go()
        assert await asyncio.gather(*tasks[1:]) == [("10.0.0.1",)] * 19
        assert tasks[0].cancelled() and names.asked == ["a"]

    play(names, run)


def test_names_whose_servers_are_silent_delay_no_other_and_their_threads_are_bounded(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        silent = [f"silent{number}" for number in range(MAX_LOOKUPS + 5)]
        names.hold(*silent)
        names.table["good"] = ["10.0.0.1"]
        for name in silent[: MAX_LOOKUPS - 1]:
            resolver.refresh(name)
        await until(lambda: len(names.asked) == MAX_LOOKUPS - 1)
        assert await resolver.addresses("good") == ("10.0.0.1",)
        for name in silent:
            resolver.refresh(name)
        await until(lambda: len(names.asked) == MAX_LOOKUPS + 1)  # "good" among them
        assert repr(resolver) == f"Resolver(1 names, running={MAX_LOOKUPS} waiting=5)"
        names.let_go()
        await until(lambda: set(names.asked) == {*silent, "good"})
        await until(lambda: "running=0 waiting=0" in repr(resolver))
        assert threading.get_ident() not in names.threads

    play(names, run)


def test_number_of_names_is_bounded(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        for number in range(MAX_NAMES + 10):
            names.table[f"n{number}"] = ["10.0.0.1"]
            clock.advance(0.01)
            await resolver.addresses(f"n{number}")
        assert repr(resolver) == f"Resolver({MAX_NAMES} names, running=0 waiting=0)"
        assert resolver.known("n0") == () and resolver.known(f"n{MAX_NAMES}") != ()

    play(names, run)


def test_preferred_address_comes_first_for_as_long_as_it_is_one_of_the_name(names):
    async def run(resolver: Resolver, clock: FakeClock) -> None:
        names.table["a"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        await resolver.addresses("a")
        resolver.prefer("a", "10.0.0.3")
        expected = ("10.0.0.3", "10.0.0.1", "10.0.0.2")
        assert await resolver.addresses("a") == expected
        clock.advance(10)
        assert await resolver.addresses("a") == expected
        names.table["a"] = ["10.0.0.1", "10.0.0.2"]
        clock.advance(10)
        assert await resolver.addresses("a") == ("10.0.0.1", "10.0.0.2")

    play(names, run)


def test_change_is_told_once_and_another_order_is_none(names):
    told: list[tuple[str, tuple[str, ...]]] = []

    async def main() -> None:
        clock = FakeClock()
        resolver = Resolver(
            asyncio.get_running_loop(),
            lookup=names,
            on_change=lambda name, addresses: told.append((name, addresses)),
            clock=clock,
        )
        for found in (["1.1.1.1", "2.2.2.2"], ["2.2.2.2", "1.1.1.1"], OSError("no"), ["3.3.3.3"]):
            names.table["a"] = found
            resolver.refresh("a")
            resolver.refresh("a")  # its answer is fresh, or it is being looked up
            asked = len(names.asked)
            await until(lambda: "running=0" in repr(resolver))
            assert len(names.asked) - asked <= 1
            clock.advance(10)

    uvloop.run(main())
    assert told == [("a", ("3.3.3.3",))] and len(names.asked) == 4


def test_lookup_may_outlive_its_loop(names):
    names.hold("a")
    left: list[threading.Thread] = []

    async def main() -> None:
        Resolver(asyncio.get_running_loop(), lookup=names).refresh("a")
        await until(lambda: names.asked == ["a"])
        left.extend(each for each in threading.enumerate() if each.name == "lookup")

    uvloop.run(main())
    names.let_go()
    for thread in left:
        assert thread.daemon
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("localhost", False),
        ("1.2.3", False),
        ("10.0.0.1.nip.io", False),
        ("", False),
        ("a\0b", False),
    ],
)
def test_literal_addresses_are_told_from_names(host, expected):
    assert is_literal(host) is expected


def test_system_answers_for_localhost():
    assert set(look_up("localhost")) <= {"127.0.0.1", "::1"} and look_up("localhost")
