"""Streams side by side, and streams that the client leaves."""

import asyncio

import httpx
import openai
import pytest

from conftest import MODEL
from metrics import total, wait_for

CONCURRENT = 50
LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell a very long story."}],
    "max_tokens": 30_000,
    # vLLM's own switch: generate to the limit, so that the stream cannot end by itself during the test.
    "extra_body": {"ignore_eos": True},
}


def in_flight(demo) -> float:
    return total(demo.url, "tidegate_http_in_flight_requests")


def at_the_engines(demo) -> float:
    return sum(
        total(url, name) for url in demo.engine_urls for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
    )


def assert_all_gone(demo) -> None:
    """Nothing is left: not at the gateway, not in its view of the backends, not at the engines."""
    wait_for("tidegate_http_in_flight_requests", lambda: in_flight(demo), lambda n: n == 0)
    wait_for("tidegate_in_flight_requests", lambda: total(demo.url, "tidegate_in_flight_requests"), lambda n: n == 0)
    wait_for("requests at the engines", lambda: at_the_engines(demo), lambda n: n == 0)


def test_fifty_streams_at_once_stay_apart(demo):
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[set[str], str, str | None, int]:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Story number {number}, please."}],
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        ids, text, reason, tokens = set(), "", None, 0
        async with stream:
            async for chunk in stream:
                ids.add(chunk.id)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
        return ids, text, reason, tokens

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=50) as client:
            return await asyncio.gather(*(one(client, n) for n in range(CONCURRENT)), return_exceptions=True)

    results = asyncio.run(all_of_them())
    failures = [f"stream {n}: {r!r}" for n, r in enumerate(results) if isinstance(r, BaseException)]
    assert not failures, f"{len(failures)} of {CONCURRENT} failed:\n" + "\n".join(failures[:10])
    for number, (ids, text, reason, tokens) in enumerate(results):
        assert len(ids) == 1, f"stream {number} carried chunks of {len(ids)} answers: {ids}"
        assert text and reason in ("stop", "length"), f"stream {number}: text {text!r}, finish_reason {reason!r}"
        assert 0 < tokens <= 16, f"stream {number}: {tokens} completion tokens"
    assert len({next(iter(ids)) for ids, *_ in results}) == CONCURRENT, "two streams were the same answer"
    assert_all_gone(demo)


def test_a_stream_that_the_client_closes_early_ends_everywhere(client, demo):
    cancelled_before = total(demo.url, "tidegate_requests_total", status="cancelled")
    stream = client.chat.completions.create(stream=True, **LONG)
    try:
        for _ in range(3):
            next(stream)
        wait_for("tidegate_http_in_flight_requests during the stream", lambda: in_flight(demo), lambda n: n == 1)
        wait_for("requests at the engines during the stream", lambda: at_the_engines(demo), lambda n: n == 1)
    finally:
        stream.close()
    assert_all_gone(demo)
    wait_for(
        'tidegate_requests_total{status="cancelled"} after one more',
        lambda: total(demo.url, "tidegate_requests_total", status="cancelled"),
        lambda n: n == cancelled_before + 1,
    )


def test_twenty_streams_that_are_closed_early_leave_nothing_and_blame_nobody(demo):
    failures_before = total(demo.url, "tidegate_backend_requests_total", outcome="failure")

    async def leave_early(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(stream=True, **LONG)
        await anext(stream)
        await stream.close()

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
            await asyncio.gather(*(leave_early(client) for _ in range(20)))

    asyncio.run(all_of_them())
    assert_all_gone(demo)
    assert total(demo.url, "tidegate_backend_requests_total", outcome="failure") == failures_before
    assert total(demo.url, "tidegate_breaker_state", state="open") == 0


def test_a_client_that_leaves_before_a_whole_answer_stops_the_engine_too(demo):
    body = {k: v for k, v in LONG.items() if k != "extra_body"} | LONG["extra_body"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.3))
    assert_all_gone(demo)


def test_a_connection_is_kept_after_a_stream_that_was_read_to_its_end(demo):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    with httpx.Client(base_url=demo.url, timeout=30) as http:
        locals_seen = set()
        for _ in range(3):
            with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                locals_seen.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                answer.read()
    assert len(locals_seen) == 1, f"three requests used {len(locals_seen)} connections"
