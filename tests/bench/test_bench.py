"""The pure parts of the benchmark, its CPU accounting, and its C programs against each other."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from bench import BenchError, tree
from bench.alternate import turns
from bench.backend import ANSWER_BYTES, Backend, Seen
from bench.baseline.app import check
from bench.baseline.picks import RoundRobin
from bench.commands import make_parser, parse_size
from bench.compare import announcement
from bench.cpu_sets import Cpus
from bench.front_end import Site
from bench.front_ends import FRONT_ENDS, is_stale
from bench.load import Load, hold_streams, parse_streams, parse_wrk
from bench.machine import PINS, parse_pins, require
from bench.memory import Memory, copies_of, parse_ps, table, told
from bench.rounds import DIRECT, Reading, Round, Shares, account, bottleneck_of, round_from
from bench.summary import markdown, summarise
from bench.workload import Workload


def one_cpu() -> Cpus:
    cpu = min(os.sched_getaffinity(0))
    return Cpus((cpu,), (cpu,), (cpu,))


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
WRK_OUTPUT = """\
Running 5s test @ http://127.0.0.1:40000
  1 threads and 16 connections
Requests/sec:   2000.00
{"seconds":5.000000,"requests":10000,"bytes":3770000,"connect":0,"read":1,"write":0,"status":4,"timeout":0,\
"mean_us":850,"p50_us":800,"p90_us":900,"p99_us":1500,"max_us":2000}
"""
STREAM_OUTPUT = (
    '{"seconds":2.000000,"events":51200,"streams_finished":3,"bytes":8452741,"errors":0,"first_error":"",'
    '"mean_us":300,"p50_us":205,"p99_us":2235,"max_us":9987,"cpu_s":0.2951}\n'
)
LOAD = Load(
    seconds=2.0, done=1000, received_bytes=377000, errors=(), mean_us=550, p50_us=500, p99_us=900, max_us=1200
)
SEEN = Seen(
    requests=(504, 504),
    body_bytes=1008 * 1024,
    bad_requests=0,
    other_requests=0,
    events_sent=0,
    events_skipped=0,
    events_late=0,
)
WORKLOAD = Workload(clients=16, seconds=2.0)
CPUS = Cpus((0,), (1,), (1,))
BEFORE = Reading(wall_s=100.0, front_end_s={"io": 0.6, "prepare": 0.4}, backend_s=5.0, core_s=50.0)
AFTER = Reading(
    wall_s=102.0, front_end_s={"io": 1.5, "prepare": 1.2, "late": 0.2}, backend_s=5.5, core_s=51.96
)


def test_wrk_output_is_read_and_answers_above_399_are_no_successes() -> None:
    load = parse_wrk(WRK_OUTPUT)
    assert (load.done, load.p50_us, load.p99_us) == (9996, 800, 1500)
    assert load.errors == ("1 read errors", "4 status errors")


def test_stream_output_is_read() -> None:
    load = parse_streams(STREAM_OUTPUT)
    assert (load.done, load.errors, load.p99_us) == (51200, (), 2235)


def test_stream_errors_name_the_first_one() -> None:
    load = parse_streams(
        STREAM_OUTPUT.replace('"errors":0,"first_error":""', '"errors":2,"first_error":"no connection"')
    )
    assert load.errors == ("2 streams failed, the first: no connection",)


def test_output_without_a_result_is_an_error() -> None:
    with pytest.raises(BenchError, match="wrk printed no result"):
        parse_wrk("unable to connect\n")


def account_one(
    name: str, workload: Workload, load: Load, load_cpu_s: float, seen: Seen, before: Reading, after: Reading
) -> Round:
    return account(name, workload, [load], load_cpu_s, seen, before, after, cpus=CPUS)


def test_round_divides_cpu_of_the_tree_by_successes() -> None:
    done = account_one("meshd", WORKLOAD, LOAD, 0.7, SEEN, BEFORE, AFTER)
    assert done.cpu_us == pytest.approx(1900.0)
    assert done.cpu_us_by_process == pytest.approx({"io": 900.0, "prepare": 800.0, "late": 200.0})
    assert done.per_s == 500.0
    assert done.core == pytest.approx(0.95)
    assert (done.load_core, done.backend_core) == pytest.approx((0.6, 0.25))
    assert (done.mean_us, done.bottleneck) == (550, "front end")
    assert done.strangers == pytest.approx(0.03)
    assert (done.is_valid, done.notes, done.upstream_share) == (True, (), 0.5)


def test_round_with_an_idle_core_is_marked_as_bound_by_the_load() -> None:
    done = account_one(
        "meshd", WORKLOAD, LOAD, 0.7, SEEN, BEFORE, replace(AFTER, front_end_s={"io": 2.0}, core_s=51.0)
    )
    assert done.notes == ("load generator bound: 50% of the core used",)
    assert done.is_valid


def test_round_on_a_contended_core_says_so() -> None:
    done = account_one(
        "meshd", WORKLOAD, LOAD, 0.7, SEEN, BEFORE, replace(AFTER, front_end_s={"io": 2.0}, core_s=52.0)
    )
    assert done.notes == ("others took 50% of the core",)


def test_round_in_which_the_backend_saw_fewer_requests_than_answers_is_invalid() -> None:
    seen = replace(SEEN, requests=(499, 500), body_bytes=999 * 1024)
    done = account_one("meshd", WORKLOAD, LOAD, 0.7, seen, BEFORE, AFTER)
    assert done.faults == ("1000 answers, but 999 requests reached the backend",)


def test_round_with_a_shortened_body_is_invalid() -> None:
    done = account_one(
        "meshd", WORKLOAD, LOAD, 0.7, replace(SEEN, body_bytes=SEEN.body_bytes - 1), BEFORE, AFTER
    )
    assert not done.is_valid
    assert "1008 requests of 1024 B brought" in done.faults[0]


def test_round_with_shortened_answers_is_invalid() -> None:
    done = account_one("meshd", WORKLOAD, replace(LOAD, received_bytes=304_999), 0.7, SEEN, BEFORE, AFTER)
    assert done.faults == ("1000 answers brought only 304999 B",)


def test_round_with_socket_errors_is_invalid() -> None:
    done = account_one("meshd", WORKLOAD, replace(LOAD, errors=("3 read errors",)), 0.7, SEEN, BEFORE, AFTER)
    assert done.faults == ("3 read errors",)


def test_stream_round_that_delivers_too_few_events_is_saturated() -> None:
    workload = Workload(clients=10, seconds=2.0, streams=10, events_per_s=100)
    done = account_one("meshd", workload, LOAD, 0.7, SEEN, BEFORE, AFTER)
    assert done.notes == ("saturated: 50% of the events delivered in time",)


MIXED = Workload(clients=16, seconds=2.0, long_clients=1, long_bytes=1 << 20)
LONG = replace(LOAD, done=4, received_bytes=4 * ANSWER_BYTES, p99_us=700_000)


def account_mixed(seen: Seen, long: Load = LONG) -> Round:
    return account("meshd", MIXED, [LOAD, long], 0.7, seen, BEFORE, AFTER, cpus=CPUS)


def test_long_requests_have_figures_of_their_own_and_share_the_cpu() -> None:
    bytes_sent = 1000 * 1024 + 4 * (1 << 20)
    done = account_mixed(replace(SEEN, requests=(502, 502), body_bytes=bytes_sent))
    assert (done.faults, done.done, done.per_s) == ((), 1004, 500.0)
    assert (done.long_per_s, done.p99_us, done.long_p99_us) == (2.0, 900, 700_000)
    assert done.cpu_us == pytest.approx(1.9e6 / 1004)
    short = account_mixed(replace(SEEN, requests=(502, 502), body_bytes=bytes_sent - 1))
    assert "fewer than" in short.faults[0]


def test_a_round_in_which_no_long_request_was_answered_is_invalid() -> None:
    done = account_mixed(SEEN, replace(LONG, done=0, received_bytes=0))
    assert done.faults == ("nothing was done",)


def test_a_rewritten_body_may_grow_and_not_shrink() -> None:
    for size, is_valid in ((1200, True), (1000, False)):
        seen = replace(SEEN, body_bytes=1008 * size)
        done = account("x", WORKLOAD, [LOAD], 0.7, seen, BEFORE, AFTER, cpus=CPUS, rewrites_bodies=True)
        assert done.is_valid == is_valid


def test_requests_that_no_client_asked_for_are_noted() -> None:
    done = account_one("x", WORKLOAD, LOAD, 0.7, replace(SEEN, other_requests=7), BEFORE, AFTER)
    assert done.notes == ("7 requests to the backend that no client asked for",)


SHARES = Shares(core=0.5, hottest=0.5, strangers=0.0, load=0.5, backend=0.5)


@pytest.mark.parametrize(
    ("changes", "are_apart", "who"),
    [
        ({"core": 0.95}, True, "front end"),
        ({"core": 0.5, "hottest": 0.95}, True, "front end"),
        ({"core": 0.4, "strangers": 0.55}, True, "others on its cores"),
        ({"load": 0.95}, True, "load generator"),
        ({"backend": 0.95}, True, "backend"),
        ({"load": 0.95}, False, "load generator and backend"),
        ({}, True, "none"),
    ],
)
def test_bottleneck_is_whoever_has_nothing_left(changes: dict[str, float], are_apart: bool, who: str) -> None:
    assert bottleneck_of("meshd", replace(SHARES, **changes), are_apart) == who
    assert bottleneck_of(DIRECT, replace(SHARES, core=1.0), are_apart) == "none"


def test_a_round_comes_back_from_json_as_it_was() -> None:
    done = account_one("meshd", WORKLOAD, replace(LOAD, errors=("3 read errors",)), 0.7, SEEN, BEFORE, AFTER)
    assert round_from(json.loads(json.dumps(asdict(done)))) == done


def test_rate_ratio_is_ours_over_the_baselines() -> None:
    rounds = [replace(a_round("fastapi", 300.0), per_s=200.0), replace(a_round("meshd", 30.0), per_s=500.0)]
    assert [row.rate_ratio for row in summarise(rounds, "fastapi")] == [1.0, 2.5]


def a_round(front_end: str, cpu_us: float, faults: tuple[str, ...] = ()) -> Round:
    done = account_one(front_end, WORKLOAD, LOAD, 0.7, SEEN, BEFORE, AFTER)
    return replace(done, cpu_us=cpu_us, faults=faults)


def test_rows_hold_medians_and_ratios_to_the_baseline() -> None:
    rounds = [a_round("fastapi", cpu) for cpu in (290.0, 300.0, 340.0)]
    rounds += [a_round("meshd", cpu) for cpu in (40.0, 30.0, 20.0)]
    baseline, meshd = summarise(rounds, "fastapi")
    assert (baseline.cpu_us, baseline.ratio) == (300.0, 1.0)
    assert (meshd.cpu_us, meshd.cpu_us_low, meshd.cpu_us_high, meshd.ratio) == (30.0, 20.0, 40.0, 10.0)


def test_invalid_rounds_count_for_nothing_but_are_shown() -> None:
    rounds = [a_round("fastapi", 300.0), a_round("meshd", 1.0, ("3 read errors",)), a_round("meshd", 30.0)]
    row = summarise(rounds, "fastapi")[1]
    assert (row.cpu_us, row.rounds, row.invalid, row.notes) == (30.0, 2, 1, ("3 read errors",))


def test_table_marks_a_front_end_without_one_valid_round() -> None:
    text = markdown(summarise([a_round("meshd", 1.0, ("3 read errors",))], "fastapi"), "request")
    assert "INVALID: 3 read errors" in text.splitlines()[2]
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_turns_go_forwards_and_backwards() -> None:
    assert "".join(turns("ABC", 3)) == "ABCCBAABC"


@pytest.mark.parametrize(("text", "size"), [("1k", 1024), ("128K", 131072), ("1m", 1 << 20), ("777", 777)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "1g", "64", "9m", "-1k"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_the_first_lines_say_what_will_happen_and_how_long_it_takes() -> None:
    text = announcement("requests", front_ends=8, workloads=1, rounds=5, seconds=5.0)
    assert text.startswith("requests: 8 front ends") and "5 rounds of 5 s each; about 5 minutes" in text
    assert "goals" in text and "--help" in text


def test_default_point_is_one_kib_and_sixteen_clients_round_robin() -> None:
    args = make_parser().parse_args(["requests"])
    assert (args.sizes, args.clients, args.policy, args.same_prompt) == ([1024], 16, "round_robin", False)


def test_stat_line_with_parentheses_in_the_name_is_read() -> None:
    line = "42 (a) b (c) S 7 42 40 0 -1 4194560 1 2 3 4 100 50 30 20 20 0 1 0 99 0 0"
    process = tree.parse_stat(line)
    assert (process.pid, process.parent, process.session, process.name) == (42, 7, 40, "a) b (c")
    assert process.cpu_s == 200 / tree.TICKS_PER_S


def test_tree_holds_descendants_and_orphans_of_the_session() -> None:
    def process(pid: int, parent: int, session: int) -> tree.Process:
        return tree.Process(pid, parent, session, "x", False, 1.0)

    everyone = [process(1, 0, 1), process(10, 1, 10), process(11, 10, 10), process(12, 11, 12)]
    everyone += [process(13, 1, 10), process(20, 1, 20)]
    assert {found.pid for found in tree.members_of(10, everyone)} == {10, 11, 12, 13}
    assert tree.members_of(99, everyone) == []


SPIN = "import time\nwhile time.process_time() < {seconds}: pass\n"


def test_cpu_of_a_child_is_counted_alive_and_after_it_was_reaped() -> None:
    # a shell that waits for a child which burns CPU, then tells us and lives on until its input ends
    script = f"{sys.executable} -c '{SPIN.format(seconds=0.3)}'; echo reaped; read line"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        counted = tree.cpu_of(shell.pid)
        assert [process.pid for process in tree.tree(shell.pid)] == [shell.pid]
        shell.communicate("\n")
    assert counted >= 0.3 - 2 / tree.TICKS_PER_S


@needs_cc
def test_listener_is_found_in_the_process_that_holds_it_and_in_no_other() -> None:
    with Backend([min(os.sched_getaffinity(0))]) as backend:
        assert tree.listening_pids(backend.ports[0], [*backend.pids, os.getpid()]) == set(backend.pids)


@needs_cc
def test_process_that_may_leave_its_core_is_a_stray() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Backend([cpu]) as backend:
        assert tree.strays(backend.pids[0], [cpu, cpu + 1]) == []
        assert len(tree.strays(backend.pids[0], [cpu + 1])) == 1


@needs_cc
def test_backend_answers_a_megabyte_and_counts_it() -> None:
    body = b'{"model":"m1","prompt":"' + b"x" * (1 << 20) + b'"}'
    with Backend([min(os.sched_getaffinity(0))]) as backend:
        for url in (*backend.urls, backend.urls[1]):
            with urlopen(Request(f"{url}/v1/completions", data=body, method="POST"), timeout=20) as answer:
                text = answer.read()
                assert f'"prompt_tokens":{len(body):12}'.encode() in text
                assert len(text) == ANSWER_BYTES
        seen = backend.seen()
    assert (seen.requests, seen.body_bytes) == ((1, 2), 3 * len(body))


@needs_cc
def test_backend_tells_of_itself_and_counts_what_no_client_asked_for() -> None:
    with Backend([min(os.sched_getaffinity(0))]) as backend:
        for path in ("health", "v1/models", "get_server_info"):
            with urlopen(f"{backend.urls[1]}/{path}", timeout=20) as answer:
                text = answer.read()
            assert (b'"is_generation":true' in text) == path.endswith("_info")
        with pytest.raises(HTTPError, match="404"):
            urlopen(
                Request(f"{backend.urls[0]}/v1/completions/render", data=b"{}", method="POST"), timeout=20
            )
        with pytest.raises(HTTPError, match="404"):
            urlopen(Request(f"{backend.urls[0]}/flush", method="POST"), timeout=20)
        seen = backend.seen()
    assert (seen.requests, seen.other_requests, seen.bad_requests) == ((0, 0), 2, 0)


@needs_cc
def test_backends_on_two_processes_have_four_listeners() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Backend([cpu, cpu]) as backend:
        with urlopen(Request(f"{backend.urls[3]}/v1/completions", data=b"{}", method="POST"), timeout=20):
            pass
        assert backend.seen().requests == (0, 0, 0, 1)


@needs_cc
def test_stream_load_reads_every_event_of_the_backend() -> None:
    cpu = min(os.sched_getaffinity(0))
    moments: list[str] = []
    with Backend([cpu], events_per_s=200) as backend:
        load, _ = hold_streams(
            one_cpu(),
            backend.ports[0],
            streams=3,
            events_per_stream=5,
            seconds=0.5,
            on_start=lambda: moments.append("start"),
            on_end=lambda: moments.append("end"),
        )
        seen = backend.seen()
    assert (load.errors, moments) == ((), ["start", "end"])
    assert 0 < load.done <= seen.events_sent
    assert sum(seen.requests) > 3  # streams ended and were followed by others


@needs_cc
def test_stream_load_tells_what_a_wrong_answer_was() -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(503)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(BenchError, match=r"only 0 of 2 streams began; 2 streams failed.*HTTP/1.0 503"):
            hold_streams(
                one_cpu(),
                server.server_port,
                streams=2,
                events_per_stream=5,
                seconds=0.1,
                on_start=lambda: None,
                on_end=lambda: None,
            )
        server.shutdown()


@pytest.mark.parametrize("name", list(FRONT_ENDS))
def test_command_of_each_front_end_names_its_port_and_upstreams(name: str, tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:7001", "http://127.0.0.1:7002")
    command = FRONT_ENDS[name].command(Site(tmp_path, 7000, 7003, urls, "round_robin", None))
    text = " ".join(command) + "".join(path.read_text() for path in tmp_path.iterdir())
    assert all(port in text for port in ("7000", "7001", "7002"))


def test_baseline_refuses_what_is_no_prompt() -> None:
    assert check(b'{"model":"m1","prompt":"a"}') == ("", "a")
    assert check(b'{"prompt":[[1,2],[3]]}') == ("", [[1, 2], [3]])
    for body in (b"{", b"[]", b'{"prompt":null}', b'{"prompt":["a",1]}', b'{"prompt":"a","stream":1}'):
        assert check(body)[0], body


def test_baseline_takes_upstreams_in_turn() -> None:
    picker = RoundRobin(["a", "b"])
    assert [picker.pick("x") for _ in range(4)] == ["a", "b", "a", "b"]


def test_missing_program_is_named_with_its_package() -> None:
    with pytest.raises(BenchError, match="apt-get install no-such-program"):
        require(["sh", "no-such-program"])


def test_missing_program_that_is_made_is_named_with_its_command() -> None:
    with pytest.raises(BenchError, match="no-such-program; run make it"):
        require(["sh", "no-such-program"], "make it")


def test_compiled_meshd_is_not_started_where_the_sources_are(tmp_path: Path) -> None:
    site = Site(tmp_path, 7000, 7003, ("http://127.0.0.1:7001",), "round_robin", None)
    pure, compiled = (FRONT_ENDS[name].command(site) for name in ("meshd", "meshd-compiled"))
    assert compiled[:2] == ["env", f"--chdir={tmp_path}"] and compiled[3:] == pure[1:]
    assert compiled[2].endswith("/.venv-compiled/bin/python")


def test_own_smaps_agree_with_the_kernel_about_resident_memory() -> None:
    sums = tree.smaps_kib(os.getpid())
    assert 0 < sums["Private_Dirty"] + sums["Private_Clean"] <= sums["Rss"]
    assert sums["Rss"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.1


def test_limits_hold_for_the_io_process_and_for_prepare_workers_beyond_the_first() -> None:
    io = Memory("io", 0, 1, pss_kib=41 * 1024, private_kib=10)
    first = Memory("prepare", 0, 2, pss_kib=10, private_kib=99 * 1024)
    second = Memory("prepare", 1, 3, pss_kib=10, private_kib=25 * 1024)
    assert [one.is_over for one in (io, first, second)] == [True, False, False]
    assert "OVER" in table([io, first, second]).splitlines()[2]


def test_processes_of_other_instances_are_left_out() -> None:
    text = '[{"role":"io","index":0,"pid":5}]\n[{"role":"io","index":0,"pid":6}]\n'
    assert [row["pid"] for row in parse_ps(text, {6})] == [6]


def test_tokenizer_copies_are_counted_by_leaders_and_by_memory() -> None:
    def node(leader_rss: int, shared: int) -> list[Memory]:
        return [
            Memory("leader", 0, 1, pss_kib=shared // 2, private_kib=0, rss_kib=leader_rss),
            Memory("leader", 1, 2, pss_kib=shared // 2, private_kib=0, rss_kib=leader_rss),
            *(Memory("prepare", i, 3 + i, pss_kib=5000, private_kib=5000) for i in range(8)),
        ]

    copies = copies_of(node(130_000, 230_000), node(30_000, 30_000))
    assert (copies.workers, copies.held, copies.private_kib, copies.one_kib) == (8, 2, 40_000, 100_000)
    assert copies.measured == 2.0
    assert told(copies).startswith("8 prepare workers hold 2 copies")


def test_versions_of_the_baseline_are_pinned() -> None:
    pins = parse_pins(PINS.read_text())
    assert {"fastapi", "uvicorn", "aiohttp"} <= set(pins) and all(pins.values())
    assert parse_pins("# a\nx==1.2  # why\n\n") == {"x": "1.2"}


def test_a_build_older_than_a_source_is_stale(tmp_path: Path) -> None:
    source, stamp = tmp_path / "src" / "deep" / "a.py", tmp_path / "built"
    source.parent.mkdir(parents=True)
    source.touch()
    assert is_stale(stamp, tmp_path / "src")
    stamp.touch()
    os.utime(source, (1000, 1000))
    assert not is_stale(stamp, tmp_path / "src")
    os.utime(source, (stamp.stat().st_mtime + 10,) * 2)
    assert is_stale(stamp, tmp_path / "src")


def test_a_bench_that_is_told_to_end_ends_what_it_started() -> None:
    script = (
        "import os, signal, sys\n"
        "import bench.__main__ as bench\n"
        "def run(args):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('stopped', flush=True)\n"
        "bench.RUN['table'] = run\n"
        "sys.exit(bench.main(['table', '--list']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("stopped\n", 128 + signal.SIGTERM)
