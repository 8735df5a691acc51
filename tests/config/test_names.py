from meshd.config.names import unknown


def test_the_nearest_name_is_proposed_with_the_same_prefix() -> None:
    assert unknown("flag", "prt", ["port", "host"], prefix="--") == "unknown flag --prt: did you mean --port?"


def test_nothing_is_proposed_when_nothing_is_near() -> None:
    assert unknown("key", "zzz", ["port"]) == "unknown key zzz: see meshd --help"
    assert unknown("key", "server", ["log_level"]) == "unknown key server: see meshd --help"
