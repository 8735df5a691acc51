from meshd.config.errors import ConfigErrors


def test_errors_are_kept_apart_and_shown_one_a_line() -> None:
    error = ConfigErrors(["a", "b"])
    assert (error.errors, str(error), error.exit_code) == (("a", "b"), "a\nb", 2)
