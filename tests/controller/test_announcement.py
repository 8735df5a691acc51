from __future__ import annotations

from dataclasses import replace

from meshd.config.sources import load_settings
from meshd.config.workers import WorkerSpec
from meshd.controller.announcement import Announcement, announcements


def test_upstreams_of_the_settings_get_the_common_key_and_runtime_unless_they_have_their_own() -> None:
    flags = ["--worker-urls", "http://a:1", "http://b:1", "--api-key", "k", "--backend", "tensorrt-llm"]
    specs = (
        WorkerSpec("http://c:1", api_key="own", model_id="m", priority=7, runtime="vllm"),
        WorkerSpec("http://d:1"),
    )
    settings = replace(load_settings(flags, {}).settings, workers=specs)
    found = announcements(settings)
    assert [(a.base_url, a.api_key, a.runtime) for a in found] == [
        ("http://a:1", "k", "trtllm"),
        ("http://b:1", "k", "trtllm"),
        ("http://c:1", "own", "vllm"),
        ("http://d:1", "k", "trtllm"),
    ]
    assert (found[2].model_id, found[2].priority) == ("m", 7)


def test_paths_of_tokenizer_and_template_become_labels_and_given_labels_win() -> None:
    spec = WorkerSpec(
        "http://a:1", tokenizer_path="/t", chat_template="/c", labels={"tokenizer_path": "/mine"}
    )
    labels = dict(Announcement.of(spec, None, "sglang").labels)
    assert labels == {"tokenizer_path": "/mine", "chat_template": "/c"}


def test_digest_tells_a_changed_announcement_and_shows_no_key() -> None:
    one = Announcement("http://a:1", api_key="sk-secret")
    assert one.digest() == Announcement("http://a:1", api_key="sk-secret").digest()
    assert one.digest() != replace(one, api_key="other").digest()
    assert "sk-secret" not in repr(one)
