from meshd.backend.apis.openai import envelope, finish_reason, usage


def test_envelope_leads_with_the_fixed_members_in_order() -> None:
    assert list(envelope("i", "k", "m").items()) == [
        ("id", "i"),
        ("object", "k"),
        ("created", 1700000000),
        ("model", "m"),
        ("system_fingerprint", "meshd-backend-1"),
    ]


def test_usage_adds_up_and_nothing_is_cached() -> None:
    assert usage(2, 3)["total_tokens"] == 5
    assert usage(2, 3)["prompt_tokens_details"] == {"cached_tokens": 0}


def test_finish_reason() -> None:
    assert (finish_reason(True), finish_reason(False)) == ("length", "stop")
