from __future__ import annotations

import os
import select
import signal

from meshd.supervisor.signals import SignalInbox


def test_signals_make_it_readable_and_are_taken_in_order():
    inbox = SignalInbox()
    try:
        assert inbox.take() == []
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGHUP)
        assert select.select([inbox], [], [], 20)[0]
        assert inbox.take() == [signal.SIGUSR2, signal.SIGHUP]
        assert inbox.take() == []
    finally:
        inbox.close()


def test_closing_puts_the_former_handlers_back():
    former = signal.getsignal(signal.SIGINT)
    SignalInbox().close()
    assert signal.getsignal(signal.SIGINT) is former
    assert signal.set_wakeup_fd(-1) == -1
