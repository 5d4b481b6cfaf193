"""The arithmetic of split.py, and what it makes of how answers end. Starts no process; answers come from a server in the test.

    python3 -m pytest load-tests/scenarios
"""

import asyncio
import json
import random
from itertools import islice

import pytest

import split_faults
import split_load
import split_threshold
from long_prompts import AGAIN_AFTER, TAIL_TOKENS, LongPrompts
from paced import Ending, Reading, Shot, Stopwatch, Take, ask, busy_share, ending_of, poisson
from split import span
from split_faults import FAULTS, FaultRow, fault_faults, rate_of
from split_fleet import SPLIT, UNIFIED, WORKERS, Mode, Patience, Site, engine_command, router_settings
from split_load import plan
from split_report import due_between, figures, path_cells, served_between, table, tokens_between
from split_threshold import Cell, Side, gaps, on, stall, visible_from

SITE = Site(router=1, store=2, engines={worker.name: 10 + n for n, worker in enumerate(WORKERS)})


def event(body: dict) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


TOKEN = event({"choices": [{"index": 0, "text": "sea", "finish_reason": None}]})
DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "the backend is gone", "type": "backend_error"}})


def usage(tokens: int) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": 16}}
    return event({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": tokens, **details}})


def read(*pieces: bytes) -> Reading:
    reading = Reading()
    for piece in pieces:
        reading.feed(piece)
    return reading


class TestSchedule:
    def test_requests_are_due_in_order_and_about_as_often_as_asked(self):
        due = poisson(50.0, 100.0, random.Random(1))
        assert due == sorted(due) and 0 < due[0] and due[-1] < 100
        assert 4700 < len(due) < 5300

    def test_pauses_vary_as_those_of_strangers_do(self):
        due = poisson(10.0, 1000.0, random.Random(2))
        pauses = [later - earlier for earlier, later in zip(due, due[1:])]
        longer = sum(pause > 0.1 for pause in pauses) / len(pauses)
        assert 0.34 < longer < 0.40, "a share of 1/e is longer than the mean"

    def test_the_same_seed_gives_the_same_schedule(self):
        assert poisson(5.0, 10.0, random.Random("a")) == poisson(5.0, 10.0, random.Random("a"))


class TestReading:
    def test_tokens_are_counted_in_whatever_pieces_they_come(self):
        stream = TOKEN * 3 + usage(3) + DONE
        for cut in range(len(stream)):
            reading = read(stream[:cut], stream[cut:])
            assert (reading.tokens, reading.said_tokens, reading.cached_tokens, reading.done) == (3, 3, 16, True)

    def test_each_piece_says_what_it_brought(self):
        reading = Reading()
        assert [reading.feed(piece) for piece in (TOKEN + TOKEN[:9], TOKEN[9:], DONE)] == [1, 1, 0]

    def test_line_ends_and_comments_do_not_matter(self):
        assert read(TOKEN.replace(b"\n", b"\r\n") + b": still here\n\n" + TOKEN).tokens == 2

    @pytest.mark.parametrize("error", [ERROR, event({"object": "error", "message": "no"}), b"event: error\n" + ERROR])
    def test_an_error_is_not_a_token(self, error):
        reading = read(TOKEN, error, DONE)
        assert reading.tokens == 1 and reading.error


class TestEnding:
    WHOLE = (TOKEN, TOKEN, usage(2), DONE)

    def of(self, *pieces: bytes, clean=True, late=False) -> Ending:
        return ending_of(read(*pieces), 2, clean, late)

    def test_all_tokens_and_the_end_make_it_whole(self):
        assert self.of(*self.WHOLE) is Ending.WHOLE

    def test_without_a_token_nothing_counts_as_begun(self):
        assert self.of() is Ending.REFUSED
        assert self.of(ERROR, DONE) is Ending.REFUSED
        assert self.of(clean=False) is Ending.REFUSED
        assert self.of(clean=False, late=True) is Ending.REFUSED

    def test_an_error_event_counts_however_the_stream_ends(self):
        assert self.of(TOKEN, ERROR) is Ending.ERROR_EVENT
        assert self.of(TOKEN, ERROR, DONE) is Ending.ERROR_EVENT
        assert self.of(TOKEN, ERROR, clean=False) is Ending.ERROR_EVENT

    def test_a_connection_that_breaks_off_is_told_from_one_that_falls_silent(self):
        assert self.of(TOKEN, clean=False) is Ending.BROKEN
        assert self.of(TOKEN, clean=False, late=True) is Ending.SILENT

    def test_a_clean_end_that_is_too_early_is_short(self):
        assert self.of(TOKEN) is Ending.SHORT
        assert self.of(TOKEN, TOKEN) is Ending.SHORT
        assert self.of(TOKEN, usage(1), DONE) is Ending.SHORT
        assert self.of(TOKEN, usage(2), DONE) is Ending.SHORT, "a token is missing"
        assert self.of(TOKEN, TOKEN, TOKEN, usage(3), DONE) is Ending.SHORT, "one came twice"


def answered(*writes: bytes, hold_s: float = 0.0, within_s: float = 5.0) -> Take:
    """What a client makes of a server that answers so, holds the connection for a while, and closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for data in writes:
            writer.write(data)
            await writer.drain()
        await asyncio.sleep(hold_s)
        writer.close()

    async def run() -> Take:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask(port, Shot(0.0, b"{}", 20, 2), Stopwatch(), within_s=within_s)

    return asyncio.run(run())


HEAD = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-Tidegate-Backend: decode-worker-1\r\n"
    b"X-Tidegate-Path: prefill_then_decode\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class TestAsking:
    def test_a_whole_answer_is_timed_token_by_token(self):
        take = answered(HEAD, chunk(TOKEN), chunk(TOKEN + usage(2) + DONE), END)
        assert (take.ending, take.backend, take.path) == (Ending.WHOLE, "decode-worker-1", "prefill_then_decode")
        assert len(take.arrivals_s) == 2 and len(take.gaps_s) == 1
        assert 0 < take.ttft_s <= take.ended_s and take.cached_tokens == 16

    def test_a_refusal_is_quoted(self):
        take = answered(b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nlate')
        assert take.ending is Ending.REFUSED and "503" in take.detail and "late" in take.detail

    def test_a_connection_that_is_closed_in_mid_stream_is_broken(self):
        assert answered(HEAD, chunk(TOKEN)).ending is Ending.BROKEN
        assert answered(HEAD, chunk(TOKEN)[:20]).ending is Ending.REFUSED
        assert answered(HEAD, chunk(TOKEN), chunk(TOKEN)[:20]).ending is Ending.BROKEN

    def test_a_clean_end_without_all_tokens_is_short(self):
        assert answered(HEAD, chunk(TOKEN), END).ending is Ending.SHORT

    def test_nobody_listens(self):
        take = asyncio.run(ask(1, Shot(0.0, b"{}", 20, 2), Stopwatch()))
        assert take.ending is Ending.REFUSED and take.detail

    def test_silence_is_given_up_on(self):
        assert answered(HEAD, chunk(TOKEN), hold_s=0.3, within_s=0.1).ending is Ending.SILENT

    def test_the_machine_is_watched(self):
        assert busy_share([10, 0, 10, 80, 0, 0, 0, 0], [20, 0, 20, 110, 10, 0, 0, 0]) == pytest.approx(1 / 3)
        assert busy_share([1] * 8, [1] * 8) == 0


class TestPrompts:
    SHAPE = LongPrompts(range(100, 201), range(5, 8), again=0.5)

    def prompts(self, count: int) -> list[list[int]]:
        return [json.loads(shot.body)["prompt"] for shot in islice(self.SHAPE.shots(random.Random(1)), count)]

    def test_lengths_are_as_asked(self):
        for shot in islice(self.SHAPE.shots(random.Random(1)), 50):
            assert 100 <= shot.prompt_tokens <= 200 + TAIL_TOKENS and 5 <= shot.output_tokens < 8

    def test_some_repeat_an_earlier_prompt_that_is_no_longer_new(self):
        prompts = self.prompts(200)
        repeats = []
        for index, prompt in enumerate(prompts):
            repeats += [index - n for n, other in enumerate(prompts[:index]) if prompt[: len(other)] == other]
        assert 60 < len(repeats) < 140 and min(repeats) >= AGAIN_AFTER

    def test_a_schedule_gives_each_request_its_time(self):
        shots = self.SHAPE.schedule([0.5, 1.5], random.Random(1))
        assert [shot.due_s for shot in shots] == [0.5, 1.5]

    def test_a_span_is_one_number_or_two(self):
        assert list(span("5")) == [5] and span("4000-8000") == range(4000, 8001)
        for wrong in ("0-5", "9-5"):
            with pytest.raises(Exception):
                span(wrong)


class TestFleet:
    def test_split_serving_gives_each_worker_its_part(self):
        mode = Mode("split", split=True, min_prefill_tokens=300)
        settings = router_settings(mode, SITE, Patience(), scale=0.5)
        serving = settings["disaggregated_serving"]
        assert (serving["enabled"], serving["min_prefill_tokens"]) == (True, 300)
        assert (serving["prefill_timeout"], serving["kv_transfer_timeout"]) == ("30000ms", "7500ms")
        assert [backend["role"] for backend in settings["backends"]].count("decode") == 3
        assert len(settings["kv_cache_index"]["event_sources"]) == len(WORKERS)
        assert "kv_consumer" in engine_command(WORKERS[2], mode, SITE, Patience(), 0.5)[-1]

    def test_without_it_all_are_alike(self):
        settings = router_settings(UNIFIED, SITE, Patience(), scale=0.5)
        assert not settings["disaggregated_serving"]["enabled"]
        assert "min_prefill_tokens" not in settings["disaggregated_serving"]
        assert all("role" not in backend and "weight" not in backend for backend in settings["backends"])
        commands = {json.dumps(engine_command(w, UNIFIED, SITE, Patience(), 0.5)[-1]) for w in WORKERS}
        assert len(commands) == 1 and "kv_both" in commands.pop()


def take(due_s: float, *arrivals_s: float, path="", ending=Ending.WHOLE, backend="d1") -> Take:
    return Take(due_s, 20, backend, path, list(arrivals_s), arrivals_s[-1] if arrivals_s else due_s, ending=ending, detail="why")


class TestFigures:
    TAKES = [
        take(0.0, 0.1, 0.2, 0.4, path="fast_decode"),
        take(1.0, 1.3, 1.4, path="prefill_then_decode", ending=Ending.BROKEN),
        take(2.0, ending=Ending.REFUSED),
    ]

    def test_times_are_of_those_that_got_a_token_and_endings_of_all(self):
        found = figures(self.TAKES, smooth_gap_s=0.15)
        assert found.smooth == 0.5, "the first answer has a gap of 0.2 s"
        assert (found.requests, found.errors, found.refused, found.dishonest) == (3, 2, 1, 0)
        assert found.ttft_p50_ms == pytest.approx(300) and found.itl_p99_ms == pytest.approx(200)
        assert found.paths == {"fast_decode": 0.5, "prefill_then_decode": 0.5}
        assert found.first_errors == ["broken connection: why", "error before the first byte: why"]

    def test_of_nothing_there_are_no_figures(self):
        assert figures([]).ttft_p99_ms == 0 and path_cells(figures([])) == ["-"] * 4

    def test_paths_are_shares(self):
        assert path_cells(figures(self.TAKES)) == ["50%", "50%", "0%", "0%"]

    def test_windows_count_what_falls_into_them(self):
        assert due_between(self.TAKES, 1.0, 2.0) == [self.TAKES[1]]
        assert tokens_between(self.TAKES, 0.2, 1.35) == 3
        assert served_between(self.TAKES, 0.0, 9.0) == 1

    def test_a_table_is_markdown(self):
        assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n|---|--:|\n| x | 1 |"


class TestLoad:
    SIZE = split_load.LoadSize((0.5, 1.0), (0.5, 0.9), 1, 0, 1, 1, 0)

    def test_all_modes_get_shares_of_the_smallest_capacity_and_the_others_their_own(self):
        rates = plan({"unified only": 10.0, "split": 4.0}, self.SIZE)
        assert rates == {"unified only": [2.0, 4.0, 5.0, 9.0], "split": [2.0, 4.0]}

    def test_one_mode_alone_gets_shares_of_its_own(self):
        assert plan({"split": 4.0}, self.SIZE) == {"split": [2.0, 4.0]}

    def test_every_error_fails_the_run(self):
        found = figures(TestFigures.TAKES)
        row = split_load.LoadRow("split", 2.0, 0.5, found, 2, 1, 9.0, 1.0, 0.2, 1.0, found.first_errors)
        assert len(split_load.load_faults([row])) == 1
        assert "| split | 2.00 | 50% | 3 | 2 |" in split_load.load_table([row])


class TestThreshold:
    def test_a_gap_counts_when_it_touches_the_time(self):
        arrivals = [1.0, 2.0, 4.0, 5.0]
        assert gaps(arrivals, 2.5, 3.0) == [2.0]
        assert gaps(arrivals, 1.5, 4.5) == [1.0, 2.0, 1.0]
        assert gaps(arrivals, 6.0, 7.0) == [] and gaps([], 0.0, 1.0) == []

    def test_the_stall_is_the_longest_gap_of_any_answer_of_that_worker(self):
        streams = [take(0, 1.0, 1.2, 1.9), take(0, 1.0, 1.5, 1.9), take(0, 1.0, 9.0, backend="d2")]
        assert stall(on(streams, "d1"), 1.1, 1.4) == [pytest.approx(0.7)]
        assert stall(on(streams, "d3"), 1.1, 1.4) == []

    def test_it_is_visible_from_where_on_every_size_doubles_the_gap(self):
        stalls = {64: 0.05, 128: 0.015, 256: 0.031, 512: 0.06}  # that of 64 is chance
        cells = {size: Cell([], [], [stall_s], set(), []) for size, stall_s in stalls.items()}
        side = Side(cells, [0.015], [0.02])
        assert visible_from(side) == 256
        assert visible_from(Side({64: cells[128]}, [0.015], [])) is None
        assert "256 tokens" in split_threshold.verdict({split_threshold.ON_DECODE.name: side})

    def test_a_table_has_a_line_without_a_prompt(self):
        side = Side({64: Cell([0.1], [0.2], [0.03, 0.05, 0.04], {"fast_decode"}, [])}, [0.015], [0.02])
        lines = split_threshold.threshold_table({"m": side}).splitlines()
        assert lines[2] == "| none |  |  | 20 ms (20) |  |"
        assert lines[3] == "| 64 | 100 ms | 200 ms | 40 ms (50) | fast_decode |"


class TestFaults:
    def row(self, *takes: Take) -> FaultRow:
        return FaultRow(SPLIT.name, "decode-killed", 1.0, figures(takes), {"before": figures(takes)}, 0.1, 1.0)

    def test_the_load_is_what_survivors_can_carry(self):
        prompts = LongPrompts(range(6000, 6001))
        # 0.6 s for a prompt at scale 1
        assert rate_of(FAULTS["prefill-killed"], prompts, 1.0) == pytest.approx(0.7 / 0.6)
        assert rate_of(FAULTS["decode-killed"], prompts, 0.5) == pytest.approx(2 * 0.7 / 0.3)

    def test_streams_that_say_that_they_broke_are_no_fault_of_the_router(self):
        honest = self.row(take(0, 1.0, ending=Ending.ERROR_EVENT), take(0, 1.0, ending=Ending.BROKEN))
        assert fault_faults([honest]) == []

    @pytest.mark.parametrize("ending", [Ending.REFUSED, Ending.SHORT, Ending.SILENT])
    def test_hidden_ends_and_early_errors_are(self, ending):
        assert len(fault_faults([self.row(take(0, 1.0, ending=ending))])) == 1

    def test_tables_name_every_ending_and_phase(self):
        row = self.row(take(0, 1.0), take(0, ending=Ending.REFUSED), take(0, 1.0, ending=Ending.BROKEN))
        assert "| split | decode-killed | 1.00 | 3 | 1 | 0 | 1 | 0 |" in split_faults.ending_table([row])
        assert "| split | decode-killed | before | 3 |" in split_faults.phase_table([row])
