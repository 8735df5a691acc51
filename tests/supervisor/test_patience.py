from __future__ import annotations

import signal

from meshd.config import Settings
from meshd.supervisor.patience import choose_patience
from meshd.supervisor.shutdown import Patience


def test_ctrl_c_of_a_demo_is_hurried_unless_times_were_given():
    demo = Settings(demo=1)
    by_settings = Patience(demo.shutdown_delay_secs, demo.shutdown_grace_period_secs)
    default = choose_patience(demo, {})
    assert default(signal.SIGINT) == Patience.hurried()
    assert default(signal.SIGTERM) == by_settings
    times = {"shutdown_delay_secs": "flag", "shutdown_grace_period_secs": "flag"}
    assert choose_patience(demo, times)(signal.SIGINT) == by_settings


def test_ctrl_c_skips_the_delay_unless_it_was_given():
    settings = Settings(shutdown_grace_period_secs=9)
    without_delay = choose_patience(settings, {"shutdown_grace_period_secs": "flag"})
    assert without_delay(signal.SIGINT) == Patience(0, 9)
    assert without_delay(signal.SIGTERM) == Patience(5, 9)
    assert choose_patience(settings, {"shutdown_delay_secs": "env"})(signal.SIGINT) == Patience(5, 9)
