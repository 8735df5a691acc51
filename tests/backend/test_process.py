import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from meshd.backend.faults import NAMES
from meshd.backend.process import build_parser, main, options_of
from meshd.backend.service import Options

HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_flags_default_to_the_defaults_of_the_service() -> None:
    arguments = build_parser().parse_args([])
    assert options_of(arguments) == Options()
    assert (arguments.host, arguments.port, arguments.listen_fd) == ("127.0.0.1", 18000, None)


def test_every_flag_is_read() -> None:
    flags = (
        "--model a --model b --api-key k --ranks 4 --embedding-dimensions 8 --token-delay-ms 20 "
        "--first-token-delay-ms 500 --capacity 3 --keepalive-secs 0.5 --fault status=503,times=2"
    )
    options = options_of(build_parser().parse_args(flags.split()))
    assert options.models == ("a", "b")
    assert (options.api_key, options.ranks, options.embedding_dimensions) == ("k", 4, 8)
    assert (options.token_delay_s, options.first_token_delay_s) == (0.02, 0.5)
    assert (options.capacity, options.keepalive_s) == (3, 0.5)
    assert (options.faults.status, options.faults.times) == (503, 2)


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--ranks", "0"],
        ["--fault", "nope"],
        ["--keepalive-secs", "x"],
        ["--capacity", "-1"],
    ],
)
def test_wrong_flag_ends_with_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_taken_port_is_a_start_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert err == f"meshd backend: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_process_tells_where_it_listens_and_ends_cleanly_on_sigterm(start_backend: Any) -> None:
    backend = start_backend()
    assert backend.line == f"listening on http://127.0.0.1:{backend.port}\n"
    assert backend.ask("GET", "/health").status == 200
    assert backend.stop() == 0


def test_sigterm_ends_a_process_with_a_stalled_request(start_backend: Any, raw_request: Any) -> None:
    backend = start_backend()
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", "/generate", {"text": "x"}, **{"x-backend-fault": "stall=1"}))
        backend.wait_for(active=1)
        assert backend.stop() == 0


def test_inherited_listening_socket_is_served(start_backend: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        backend = start_backend("--listen-fd", str(fd), pass_fds=(fd,))
    assert backend.port == port
    assert backend.ask("GET", "/health").status == 200


def test_descriptor_that_is_no_socket_is_a_start_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull) as file:
        assert main(["--listen-fd", str(file.fileno())]) == 1
    assert "cannot listen" in capsys.readouterr().err


def test_process_ends_with_its_parent() -> None:
    """The parent prints the child's line, then is killed; the child's end closes the pipe."""
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'meshd.backend', '--port', '0', '--die-with-parent'])\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("listening on ")
    parent.send_signal(signal.SIGKILL)
    parent.wait(20)
    assert parent.stdout.read() == ""  # returns only once no process holds the pipe
    parent.stdout.close()


def test_served_models_and_faults_come_from_the_flags(start_backend: Any) -> None:
    backend = start_backend("--model", "m1", "--fault", "status=500,times=1", "--capacity", "1")
    assert [m["id"] for m in backend.ask("GET", "/v1/models").json["data"]] == ["m1"]
    assert [backend.post("/v1/chat/completions", HI).status for _ in range(2)] == [500, 200]
    refused = backend.post("/v1/chat/completions", {**HI, "model": "meshd-demo"})
    assert refused.json["error"]["code"] == "model_not_found"


def test_help_tells_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0].partition("=")[0] for line in lines if line.startswith("  ") and line.strip()}
    assert told >= set(NAMES)


def test_an_unknown_fault_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--fault", "slow"])
    assert f"unknown fault 'slow'; there are {', '.join(NAMES)}" in capsys.readouterr().err
