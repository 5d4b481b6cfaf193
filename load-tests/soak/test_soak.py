"""What soak.py makes of samples, answers and logs. Starts no process but a server inside of the test.

    python3 -m pytest load-tests/soak
"""

import random
import socket
import threading
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest

import judge
import picture
from churn import CALM_S, KINDS, RELOADS, schedule
from clients import Ledger, Seen, Witness, verdict
from grounds import UNREADABLE
from place import KINDS as ENGINE_KINDS
from place import Place
from samples import LOAD_GAUGES, Sample, parse, total
from wire import Ending

HOUR = 3600
MIB = 2**20


def hour(rss_of, noise_bytes: float = MIB) -> list[Sample]:
    chance = random.Random(7)
    noisy = lambda at_s: int(rss_of(at_s) + chance.gauss(0, noise_bytes))
    return [Sample(at_s, noisy(at_s), 60, 12, at_s * 150, 0) for at_s in range(0, HOUR, 5)]


class TestMemory:
    def test_noise_is_no_leak(self):
        assert judge.memory(hour(lambda at_s: 80 * MIB)).met

    def test_a_leak_of_eight_bytes_a_request_is_found(self):
        leak = judge.memory(hour(lambda at_s: 80 * MIB + 8 * 150 * at_s))
        assert leak.met is False

    def test_what_fills_up_while_it_warms_up_is_none(self):
        assert judge.memory(hour(lambda at_s: 80 * MIB - max(0, 590 - at_s) * 50_000)).met

    def test_a_peak_is_none(self):
        assert judge.memory(hour(lambda at_s: 80 * MIB + (40 * MIB if 3000 < at_s < 3200 else 0))).met

    def test_a_short_run_says_nothing(self):
        assert judge.memory(hour(lambda at_s: 80 * MIB)[:60]).met is None


class TestFlat:
    def test_a_level_that_wavers_is_flat(self):
        assert judge.flat("fds", [60 + at % 17 for at in range(100)], 32).met

    def test_a_descriptor_lost_with_each_event_is_found(self):
        assert not judge.flat("fds", [60 + at for at in range(100)], 32).met


IDLE = "\n".join([*(f"{name} 0" for name in LOAD_GAUGES), 'tidegate_kv_stream_connected{backend="a",rank="all"} 1'])
BACKEND = {"in_flight": 0, "queued_tokens": 0, "held_kv_tokens": 0, "health": "healthy", "breaker": "closed", "draining": False}


class TestSettled:
    def test_nothing_under_way_is_settled(self):
        assert judge.settled(parse(IDLE), {"a": BACKEND}, {"a": 0}) == []

    @pytest.mark.parametrize("name", LOAD_GAUGES)
    def test_a_stuck_gauge_is_found(self, name):
        stuck = judge.settled(parse(IDLE.replace(f"{name} 0", f'{name}{{backend="a"}} 1')), {"a": BACKEND}, {})
        assert stuck == [f"{name} is 1"]

    @pytest.mark.parametrize("count", ["in_flight", "queued_tokens", "held_kv_tokens"])
    def test_a_stuck_count_of_a_backend_is_found(self, count):
        assert judge.settled(parse(IDLE), {"a": BACKEND | {count: 3}}, {}) == [f"a: {count} is 3"]

    def test_a_backend_that_stays_away_is_found(self):
        assert judge.settled(parse(IDLE), {"a": BACKEND | {"breaker": "open"}}, {})

    def test_a_request_that_goes_on_at_an_engine_is_found(self):
        assert judge.settled(parse(IDLE), {"a": BACKEND}, {"a": 1}) == ["a still has 1 requests"]

    def test_a_closed_or_late_event_stream_is_found(self):
        late = 'tidegate_kv_stream_lag_seconds{backend="a",rank="all"} 3'
        assert len(judge.settled(parse(IDLE.replace("} 1", "} 0") + "\n" + late), {"a": BACKEND}, {})) == 2


class TestCounted:
    @pytest.mark.parametrize(("requests", "met"), [(97, False), (98, True), (100, True), (101, False)])
    def test_all_that_was_sent_must_have_ended(self, requests, met):
        text = f'tidegate_requests_total{{status="2xx"}} {requests}\ntidegate_request_duration_seconds_count{{}} {requests}'
        ended, timed, *rest = judge.counted(parse(text), 100, 2)
        assert (ended.met, timed.met, all(check.met for check in rest)) == (met, True, True)

    def test_an_actor_that_restarted_is_found(self):
        checks = judge.counted(parse('tidegate_actor_restarts_total{actor="router"} 1'), 0, 0)
        assert [check.name for check in checks if not check.met] == ["actors restarted: none"]


class TestLog:
    def test_panics_and_errors_are_found(self):
        log = "2026-01-01T00:00:00Z ERROR gateway: boom\nthread 'main' panicked at src/x.rs:1\n2026-01-01T00:00:00Z  INFO fine ERROR"
        assert len(judge.odd_lines(log)) == 2

    def test_refused_settings_are_expected(self):
        assert not judge.odd_lines('T ERROR gateway::reload: settings are faulty, those of before stay in effect faults="x"')

    def test_warnings_that_differ_in_numbers_are_of_one_kind(self):
        assert judge.warnings("T  WARN a: took 3 ms\nT  WARN a: took 45 ms") == [("a: took # ms", 2)]


def stream(**more) -> Seen:
    return Seen(Ending.SERVED, 200, visit="chat turn", stream=True, begun_s=10.0, ended_s=11.0, **more)


class TestVerdict:
    def test_a_whole_stream_is_served(self):
        assert verdict(stream(clean=True, done=True), []) == ("served", "")

    @pytest.mark.parametrize("clean", [True, False])
    def test_a_stream_cut_without_an_error_event_is_a_fault_whoever_was_killed(self, clean):
        ending, fault = verdict(stream(clean=clean), [10.5])
        assert ending == "cut" and fault

    def test_an_error_event_is_meant_when_an_engine_was_killed_meanwhile(self):
        assert verdict(stream(clean=True, error_event=True), [10.5]) == ("error event", "")

    def test_an_error_event_out_of_nowhere_is_a_fault(self):
        ending, fault = verdict(stream(clean=True, error_event=True), [5.0])
        assert ending == "error event" and fault

    @pytest.mark.parametrize("status", [0, 404, 429, 500, 502, 503, 504])
    def test_a_chat_that_is_refused_is_a_fault(self, status):
        assert verdict(Seen(Ending.FAILED, status, visit="chat turn"), [10.5])[1]

    @pytest.mark.parametrize(("visit", "status"), [("unknown model", 404), ("bad body", 400), ("greedy", 429)])
    def test_own_faults_are_meant(self, visit, status):
        assert verdict(Seen(Ending.REFUSED, status, visit=visit), []) == ("own fault", "")

    def test_an_unknown_model_that_is_served_is_a_fault(self):
        assert verdict(Seen(Ending.SERVED, 200, visit="unknown model", clean=True), [])[1]

    def test_the_ledger_counts_faults_and_keeps_the_first(self):
        ledger = Ledger([])
        for _ in range(30):
            ledger.end(Seen(Ending.FAILED, 503, visit="chat turn"))
        assert (ledger.ended, ledger.errors, len(ledger.faults)) == (30, 30, 20)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"delta": {"content": "sea"}}]}\n\n'
ERROR = b'data: {"error": {"message": "gone"}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def answering(answer: bytes):
    """A server that answers one request, whatever it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(65536)
                client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield Witness(f"http://127.0.0.1:{server.getsockname()[1]}")


class TestWitness:
    @pytest.mark.parametrize(
        ("answer", "clean", "done", "error"),
        [
            (chunk(TOKEN) + chunk(b"data: [DONE]\n\n") + chunk(b""), True, True, False),
            (chunk(TOKEN) + chunk(ERROR) + chunk(b""), True, False, True),
            (chunk(TOKEN), False, False, False),
            (chunk(TOKEN) + chunk(b""), True, False, False),
        ],
        ids=["whole", "error event", "cut", "ends without a word"],
    )
    def test_how_a_stream_ends_is_seen(self, answer, clean, done, error):
        with answering(HEAD + answer) as router:
            seen = router.post("/v1/chat/completions", {}, {})
        assert (seen.stream, seen.clean, seen.done, seen.error_event) == (True, clean, done, error)
        assert seen.text == "sea" or not clean

    def test_an_answer_shorter_than_announced_is_not_clean(self):
        with answering(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{}") as router:
            assert verdict(router.post("/v1/embeddings", {}, {}), [])[0] == "cut"

    def test_nobody_there_is_a_failure(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        assert Witness(f"http://127.0.0.1:{port}").post("/", {}, {}).ending is Ending.FAILED


class TestSchedule:
    def test_a_seed_gives_the_same_events_again(self):
        assert schedule(3, HOUR, ["a", "b"]) == schedule(3, HOUR, ["a", "b"]) != schedule(4, HOUR, ["a", "b"])

    def test_an_hour_has_every_kind_and_every_way_to_reload(self):
        events = schedule(1, HOUR, ["a", "b"])
        assert {event.kind for event in events} == set(KINDS)
        assert {event.how for event in events if event.kind in ("leave", "refuse")} == set(RELOADS)

    def test_events_do_not_overlap_and_leave_calm_at_the_end(self):
        events = schedule(1, 120, ["a"])
        assert all(event.at_s + event.hold_s < later.at_s for event, later in zip(events, events[1:]))
        assert events[-1].at_s + events[-1].hold_s <= 120 - CALM_S


class TestPlace:
    def test_who_is_absent_is_neither_a_backend_nor_a_source(self):
        place = Place.free()
        settings = place.settings(frozenset({"engine-1"}))
        named = [backend["name"] for backend in settings["backends"]]
        named += [source["backend_name"] for source in settings["kv_cache_index"]["event_sources"]]
        assert "engine-1" not in named and len(settings["backends"]) == len(ENGINE_KINDS) - 1

    def test_no_two_listen_at_one_port(self):
        place = Place.free()
        ports = [place.api_port, place.admin_port]
        ports += [port for engine in place.engines for port in (engine.port, engine.live_port, engine.replay_port)]
        assert len(set(ports)) == len(ports)

    def test_there_is_more_than_one_kind_of_fault_in_settings(self):
        assert len(set(UNREADABLE)) > 1


def test_series_are_summed_by_name_and_label():
    metrics = parse('# HELP x\nx{result="a"} 1\nx{result="b"} 2\nxy 5\n')
    assert (total(metrics, "x"), total(metrics, "x", '"b"')) == (3, 2)


def test_the_picture_is_xml_with_a_mark_for_each_event():
    text = picture.draw(hour(lambda at_s: 80 * MIB), [(60.0, "kill <engine-1>"), (90.0, "drain engine-2")], "a & b")
    titles = [of.text for of in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["60 s: kill <engine-1>", "90 s: drain engine-2"]
