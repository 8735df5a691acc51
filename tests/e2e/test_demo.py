"""The first thing users run: the demo prints lines that work as they stand, and Ctrl-C ends all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_kills import is_running
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Node, wait_until
from tests.fakes.offspring import end_with_tests

ROOT = Path(__file__).parents[2]


class Demo:
    """``meshd launch --demo 2 …`` as the Makefile starts it, but on free ports; its stdout as a text."""

    def __init__(self, *flags: str) -> None:
        command = demo_command()
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--prometheus-port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=end_with_tests(),
        )
        self.text = ""
        assert self.process.stdout is not None
        while "Ctrl-C" not in self.text:
            line = self.process.stdout.readline()
            assert line, self.text
            self.text += line

    def pids(self) -> set[int]:
        """Every process of the session that the demo leads, itself included."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.getsid(int(entry.name)) == self.process.pid:
                    found.add(int(entry.name))
            except ProcessLookupError:
                continue
        return found

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def demo_command() -> list[str]:
    """The command line of ``make demo``, with the interpreter of these tests."""
    recipe = re.search(
        r"^demo:.*\n\t\$\(BIN\)/meshd (.*?) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.M
    )
    assert recipe is not None
    return [sys.executable, "-m", "meshd", *recipe[1].split()]


@pytest.fixture
def demo() -> Iterator[Demo]:
    started = Demo()
    yield started
    started.kill()


def test_printed_lines_work_as_they_stand(demo):
    assert demo_command()[3:6] == ["launch", "--demo", "2"]
    url = re.search(r"serving (http://127\.0\.0\.1:\d+) in front of 2 demo servers", demo.text)
    metrics = re.search(r"Metrics: (http://127\.0\.0\.1:\d+/metrics)", demo.text)
    curl = re.search(r"^  (curl -N .*\\\n.*')$", demo.text, re.M)
    assert url and metrics and curl, demo.text
    assert url[1] in curl[1]
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed: the printed line cannot be run")
    answer = subprocess.run(["sh", "-c", curl[1]], capture_output=True, text=True, timeout=20)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    assert text == "This is a deterministic answer to: Hello"
    with urllib.request.urlopen(metrics[1], timeout=10) as scrape:
        assert b'mesh_router_requests_total{backend_type="regular"' in scrape.read()
    with urllib.request.urlopen(url[1] + "/v1/models", timeout=10) as models:
        assert [row["id"] for row in json.load(models)["data"]] == ["meshd-demo"]


@pytest.mark.parametrize("signals_group", [True, False], ids=["Ctrl-C in a terminal", "the supervisor alone"])
def test_ctrl_c_ends_everything_within_3_s(demo, signals_group):
    """A terminal signals every process of the foreground group at once; requests are under way."""
    url = re.search(r"serving (http://127\.0\.0\.1:(\d+)) ", demo.text)
    assert url is not None
    node = Node.__new__(Node)
    node.host, node.port = "127.0.0.1", int(url[2])
    pids = demo.pids()
    assert len(pids) >= 7  # supervisor, controller, leader, prepare worker, I/O process, 2 demo upstreams
    with SteadyLoad(node, connections=4, model="meshd-demo") as load:
        load.wait_for_more(20)
        pressed_at = time.monotonic()
        if signals_group:
            os.killpg(demo.process.pid, signal.SIGINT)
        else:
            demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(10) == 0
        took = time.monotonic() - pressed_at
        load.stop()
    assert took <= 3.0
    wait_until(lambda: not any(is_running(pid) for pid in pids), "a process is left", 1)
    refused = [failure.what for failure in load.failures if not failure.is_cut]
    assert all("admission_closed" in what for what in refused), refused


def test_ctrl_c_cuts_a_request_that_would_take_longer(demo):
    url = re.search(r"serving http://127\.0\.0\.1:(\d+) ", demo.text)
    assert url is not None
    body = {"model": "meshd-demo", "prompt": "a b c", "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{url[1]}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-backend-fault": "token-delay-ms=20000"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(15) == 0
        assert b"[DONE]" not in answer.read()


def test_demo_without_a_reader_of_its_text_serves():
    """A closed stdout is no reason to end."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [*demo_command(), "--port", "0", "--prometheus-port", "0", "--json-log"],
        stdout=write, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=end_with_tests(),
    )  # fmt: skip
    os.close(write)
    try:
        assert process.stderr is not None
        line = next(text for text in process.stderr if '"ready"' in text)
        with urllib.request.urlopen(json.loads(line)["url"] + "/readiness", timeout=10) as answer:
            assert answer.status == 200
    finally:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 0
