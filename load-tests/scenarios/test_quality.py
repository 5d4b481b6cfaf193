"""The scenario's own arithmetic, on cases that can be worked out by hand. Starts no process.

    python3 -m pytest load-tests/scenarios
"""

import json
import random
from collections import Counter
from functools import partial

import pytest

from driver import Answer, Drive, parse_head, read_usage
from fleet import BLOCK_SIZE, POLICIES, Backend, all_heard
from oracle import IMBALANCE_MAX, BlockCache, Outcome, Rule, bounds, imbalance, play, replay
from quality import QUICK, faults, make_case
from report import percentile, row, table
from workloads import (
    Chains,
    Request,
    Scale,
    Talk,
    Workload,
    completion,
    conversations,
    hot_system,
    mooncake,
    shared_systems,
    turn_order,
)


def request(*chain: int, extra: int = 1, output: int = 1) -> Request:
    """A prompt of these full blocks and `extra` tokens beyond, so that every block can be reused."""
    return Request("/v1/completions", b"", len(chain) * BLOCK_SIZE + extra, output, chain)


class TestBlockCache:
    def test_what_was_served_is_found_up_to_where_prompts_part(self):
        cache = BlockCache(None)
        assert cache.serve(request(1, 2, 3)) == 0
        assert cache.serve(request(1, 2, 3)) == 3
        assert cache.serve(request(1, 2, 4)) == 2
        assert cache.serve(request(9, 2, 3)) == 0, "the beginning is missing"

    def test_the_last_token_is_always_computed(self):
        cache = BlockCache(None)
        whole = request(1, 2, extra=0)
        cache.serve(whole)
        assert cache.serve(whole) == 1

    def test_the_least_recently_used_prompt_goes_first_and_its_tail_before_its_head(self):
        cache = BlockCache(5)
        cache.serve(request(1, 2, extra=0))
        cache.serve(request(3, 4, extra=0))
        cache.serve(request(5, 6, extra=0))  # one place is free and one is made: that of block 2
        assert cache.overlap(request(1, 2)) == 1
        assert cache.overlap(request(3, 4)) == 2

    def test_a_block_in_use_makes_no_room(self):
        cache = BlockCache(3)
        cache.serve(request(1, 2, extra=0))
        assert cache.serve(request(1, 3, 4, extra=0)) == 1
        assert list(cache.blocks) == [4, 3, 1]

    def test_a_block_that_never_fills_takes_a_place(self):
        cache = BlockCache(3)
        cache.serve(request(1, extra=5))
        cache.serve(request(2, extra=5))  # four places for three: the first nameless block goes
        assert cache.overlap(request(1)) == 1
        assert len(cache.blocks) == 3

    def test_the_answer_is_held_but_for_its_last_token(self):
        assert request(1, extra=0, output=1).slots == 1
        assert request(1, extra=0, output=2).slots == 2


class TestOracle:
    def test_greedy_follows_the_prefix_and_else_goes_where_least_was_done(self):
        requests = [request(1, 2), request(3, 4), request(3, 4), request(1, 2)]
        outcome = play(requests, 2, None, Rule(0.0, None))
        assert outcome.hit_tokens == 4 * BLOCK_SIZE
        assert outcome.work == (36, 36)  # 32 + 1 + 1 for the first, 1 + 1 for the second

    def test_the_balance_moves_a_prefix_on(self):
        requests = [request(1), request(1, 2, 3), request(1, 4, 5)]
        free = play(requests, 2, None, Rule(0.0, None))
        bound = play(requests, 2, None, Rule(0.0, IMBALANCE_MAX))
        assert free.work[1] == 0 and free.hit_tokens == 2 * BLOCK_SIZE
        assert bound.work[1] > 0 and bound.hit_tokens == BLOCK_SIZE
        assert bound.imbalance < free.imbalance

    def test_a_short_prefix_does_not_bind_beyond_the_rule(self):
        requests = [request(0, 1, 2, 3), request(0, 4, 5, 6)]
        assert play(requests, 2, None, Rule(0.0, None)).work[1] == 0
        assert play(requests, 2, None, Rule(0.5, None)).work[1] > 0

    def test_a_cache_that_is_too_small_for_all_serves_what_placement_keeps_together(self):
        two_prompts = [request(1, 2, extra=0), request(3, 4, extra=0)] * 10
        assert replay(two_prompts, [0, 1] * 10, 2) == 18 * BLOCK_SIZE, "each has a cache of its own"
        assert replay(two_prompts, [0] * 20, 2) == 0, "each pushes the other out"
        assert play(two_prompts, 2, 2, Rule(0.0, IMBALANCE_MAX)).hit_tokens == 18 * BLOCK_SIZE

    def test_bounds_are_in_order(self):
        chance = random.Random(3)
        workload = shared_systems("s", QUICK.systems, chance, 100)
        found = bounds(workload.requests, 4, workload.working_set_blocks // 6)
        assert 0 < found.best.hit_tokens <= found.unbalanced.hit_tokens <= found.endless_hit_tokens
        assert found.pooled_hit_tokens <= found.endless_hit_tokens
        assert found.best_rule.balance or found.best.imbalance <= IMBALANCE_MAX

    def test_imbalance_is_the_busiest_against_the_mean(self):
        assert imbalance([10, 10]) == 1
        assert imbalance([30, 0, 0]) == 3
        assert imbalance([0, 0]) == 1
        assert Outcome(0, (3, 1)).imbalance == 1.5


class Script:
    """A dialogue whose answers are a count, in place of an engine's."""

    def __init__(self, name: int):
        self.tokens = ()
        self.name = name

    def ask(self, new_tokens: int, answer_tokens: int):
        self.tokens += (self.name,) * new_tokens
        return self.tokens, partial(completion, self.tokens, answer_tokens)

    def answer(self, answer_tokens: int) -> None:
        self.tokens += tuple(range(answer_tokens))


class TestWorkloads:
    TALK = Talk(conversations=6, turns=3, opening_tokens=20, follow_up_tokens=10, answer_tokens=5)

    def test_blocks_are_named_by_their_tokens_and_all_before_them(self):
        chains = Chains()
        block, other = (1,) * BLOCK_SIZE, (2,) * BLOCK_SIZE
        assert chains.of(block + other)[0] == chains.of(block)[0]
        assert chains.of(block + other)[1] != chains.of(other)[0]
        assert chains.of(block[:-1]) == ()

    def test_nobody_speaks_twice_within_a_few_requests(self):
        order = turn_order(self.TALK, 2, random.Random(1))
        assert sorted(order) == sorted([*range(6)] * 3)
        middle = order[:-3]  # at the end those may be left who have just spoken
        assert all(middle[i] not in middle[i + 1 : i + 3] for i in range(len(middle) - 2))

    def test_a_turn_repeats_the_turn_before_and_its_answer(self):
        order = turn_order(self.TALK, 2, random.Random(1))
        workload = conversations("c", self.TALK, order, [Script(i) for i in range(6)], 100)
        prompts = [json.loads(r.body)["prompt"] for r in workload.requests]
        for index, follow_up in enumerate(workload.requests):
            if follow_up.after is None:
                assert follow_up.prompt_tokens == 20
                continue
            before = workload.requests[follow_up.after]
            assert order[follow_up.after] == order[index] and follow_up.after < index
            assert prompts[index][: before.prompt_tokens + 5] == prompts[follow_up.after] + [0, 1, 2, 3, 4]
            held = (before.prompt_tokens + 4) // BLOCK_SIZE
            assert len(before.chain) == held and follow_up.chain[:held] == before.chain

    def test_the_hot_prompt_comes_late_and_then_often(self):
        shape = QUICK.hot
        workload = hot_system("h", shape, random.Random(1), 100)
        firsts = Counter(r.chain[0] for r in workload.requests)
        (hot, times), (_, others) = firsts.most_common(2)
        assert others == 1 and times > shape.share * 0.8 * (shape.requests - shape.others_first)
        assert all(r.chain[0] != hot for r in workload.requests[: shape.others_first])

    def test_a_trace_is_shrunk_and_keeps_what_its_requests_share(self, tmp_path):
        lines = [
            {"timestamp": 0, "input_length": 1024, "output_length": 50, "hash_ids": [0, 1]},
            {"timestamp": 6000, "input_length": 800, "output_length": 2, "hash_ids": [0, 2]},
            {"timestamp": 9000, "input_length": 1, "output_length": 2, "hash_ids": [0]},
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        scale = Scale(requests=2, block_tokens=32, answer_tokens=4, speed_up=3.0)
        first, second = mooncake("t", path, scale, 100).requests
        assert (first.prompt_tokens, second.prompt_tokens) == (64, 50)
        assert (first.output_tokens, second.output_tokens) == (4, 2)
        assert (first.at_s, second.at_s) == (0, 2)
        assert first.chain[:2] == second.chain[:2] and not set(first.chain[2:]) & set(second.chain[2:])


class TestAnswers:
    USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}

    def stream(self, *events: dict) -> bytes:
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    def test_the_counts_come_from_the_last_chunk(self):
        whole = self.stream({"choices": [{}]}, {"choices": [], "usage": self.USAGE}) + b"data: [DONE]\n\n"
        assert read_usage(whole) == {"prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 2}

    @pytest.mark.parametrize("broken", [b"", b"data: {}\n\n", b'data: {"error": {}}\n\ndata: [DONE]\n\n'])
    def test_a_broken_stream_is_an_error(self, broken):
        assert set(read_usage(broken)) == {"error"}

    def test_a_head_gives_status_and_headers(self):
        head = b"HTTP/1.1 200 OK\r\nX-Tidegate-Backend: engine-1\r\n\r\n"
        assert parse_head(head) == (200, {"x-tidegate-backend": "engine-1"})

    def test_the_fleet_is_ready_when_all_are_healthy_and_heard(self):
        one = 'tidegate_backend_state{backend="a",state="healthy"} 1\ntidegate_backend_state{backend="a",state="failed"} 0\n'
        assert all_heard(one, 1, events=False)
        assert not all_heard(one, 1, events=True)
        assert all_heard(one + 'tidegate_kv_stream_connected{backend="a"} 1\n', 1, events=True)
        assert not all_heard(one, 2, events=False)


class TestReport:
    def measured(self, answers: list[Answer]):
        case = make_case(Workload("w", [request(1, 2), request(1, 2)], 100), engines=2, capacity=4.0)
        return row(case, "exact", Drive(answers, wall_s=1.0), ["a", "b"], "")

    def test_a_row_counts_hits_work_and_errors(self):
        first = Answer("a", ttft_s=0.1, prompt_tokens=33, cached_tokens=0, output_tokens=1)
        second = Answer("a", ttft_s=0.2, prompt_tokens=33, cached_tokens=32, output_tokens=1)
        found = self.measured([first, second])
        assert (found.hit_tokens, found.errors, found.work) == (32, 0, {"a": 36, "b": 0})
        assert (found.imbalance, found.of_best, found.model) == (2, 1, 1)
        assert "| w | exact | 32 | 48.5% | 100.0% |" in table([found])

    def test_a_failed_request_and_a_wrong_count_are_errors(self):
        wrong = Answer("a", prompt_tokens=34, output_tokens=1)
        found = self.measured([Answer(error="status 500"), wrong])
        assert found.errors == 2
        assert faults([found], quick=False)

    def test_a_quick_run_fails_when_exact_finds_no_more_than_those_that_know_less(self):
        answer = Answer("a", prompt_tokens=33, cached_tokens=32, output_tokens=1)
        exact = self.measured([answer, answer])
        blind = type(exact)(**{**exact.__dict__, "policy": "round-robin"})
        assert faults([exact, blind], quick=True)
        assert not faults([exact, blind], quick=False)

    def test_percentiles_are_by_nearest_rank(self):
        assert percentile([], 0.5) == 0
        assert percentile([1, 2, 3, 4], 0.5) == 3
        assert percentile([1, 2, 3, 4], 0.99) == 4


def test_policies_differ_in_what_the_router_knows():
    backends = [Backend("a", 1)]
    assert POLICIES["round-robin"].settings(backends, 10)["selection_strategy"] == "RoundRobin"
    assert not POLICIES["ring"].settings(backends, 10)["kv_cache_index"]["enabled"]
    assert POLICIES["exact"].settings(backends, 10)["kv_cache_index"]["event_sources"]
    assert not POLICIES["approximate"].settings(backends, 10)["kv_cache_index"]["event_sources"]
