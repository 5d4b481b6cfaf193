"""What clients get when something is wrong: the right exception, the OpenAI envelope, and a gateway that goes on."""

import socket

import httpx
import openai
import pytest

from conftest import MODEL
from metrics import total, wait_for

HELLO = [{"role": "user", "content": "Name three rivers."}]


def assert_envelope(answer: httpx.Response, status: int) -> dict:
    """The OpenAI error envelope with this status; returns the error."""
    assert answer.status_code == status, f"{answer.status_code} instead of {status}: {answer.text}"
    assert answer.headers.get("content-type", "").startswith("application/json"), dict(answer.headers)
    error = answer.json().get("error")
    assert isinstance(error, dict), f"no error object: {answer.text}"
    assert isinstance(error.get("message"), str) and error["message"], answer.text
    assert isinstance(error.get("type"), str) and error["type"], answer.text
    assert "code" in error and "param" in error, answer.text
    assert answer.headers.get("x-request-id"), f"an error needs its request id most: {dict(answer.headers)}"
    return error


# ── The client's classes ──────────────────────────────────────────────────────


def test_a_chat_beyond_the_context_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "river " * 60_000}], max_tokens=4)
    assert "32768" in str(raised.value), f"the engine's own words must arrive: {raised.value}"


def test_token_ids_beyond_the_context_are_a_bad_request(client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[9906] * 40_000, max_tokens=4)


def test_a_stream_beyond_the_context_is_a_bad_request_and_no_stream(client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[9906] * 40_000, max_tokens=4, stream=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.chat.completions.create(model="no-such-model", messages=HELLO),
        lambda c: c.chat.completions.create(model="no-such-model", messages=HELLO, stream=True),
        lambda c: c.completions.create(model="no-such-model", prompt="Once"),
        lambda c: c.embeddings.create(model="no-such-model", input="a river"),
        lambda c: c.models.retrieve("no-such-model"),
    ],
    ids=["chat", "streamed chat", "completion", "embedding", "retrieve"],
)
def test_an_unknown_model_is_not_found(client, call):
    with pytest.raises(openai.NotFoundError) as raised:
        call(client)
    assert "no-such-model" in str(raised.value), raised.value


def test_a_client_error_is_no_failure_of_the_backend(client, demo):
    before = total(demo.url, "tidegate_backend_requests_total", outcome="failure")
    for _ in range(8):  # more than a breaker's threshold
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=[9906] * 40_000, max_tokens=4)
    assert total(demo.url, "tidegate_backend_requests_total", outcome="failure") == before
    assert total(demo.url, "tidegate_breaker_state", state="open") == 0
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)


def test_nobody_listening_is_a_connection_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # Closed again, so the connection is refused.
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=5) as nobody:
        with pytest.raises(openai.APIConnectionError) as raised:
            nobody.models.list()
    assert not isinstance(raised.value, openai.APITimeoutError), f"refused, not timed out: {raised.value!r}"


def test_a_client_that_times_out_leaves_nothing_behind(client, demo):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=30_000, extra_body={"ignore_eos": True}
        )
    wait_for(
        "requests in flight after the client timed out",
        lambda: total(demo.url, "tidegate_http_in_flight_requests"),
        lambda n: n == 0,
    )
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)


# ── The envelope ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO},
        {"model": None, "messages": HELLO},
        {"model": 7, "messages": HELLO},
    ],
    ids=["missing", "null", "a number"],
)
def test_a_request_without_a_model_is_refused(http, body):
    error = assert_envelope(http.post("/v1/chat/completions", json=body), 400)
    assert "model" in error["message"], error


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"model": "x", ', b"[]", b'"text"', b"\xff\xfe\x00", b'{"model": "x"} trailing'],
    ids=["empty", "open brace", "cut off", "a list", "a string", "no UTF-8", "trailing text"],
)
def test_a_body_that_is_no_json_object_is_refused(http, content):
    assert_envelope(http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"}), 400)


def test_an_unknown_path_is_not_found_and_not_forwarded(http):
    answer = http.get("/v1/no-such-thing")
    assert_envelope(answer, 404)
    assert "x-tidegate-backend" not in answer.headers, dict(answer.headers)


@pytest.mark.parametrize("path", ["/version", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter"])
def test_an_engine_s_own_paths_are_not_reachable_through_the_gateway(http, path):
    answer = http.post(path, json={})
    assert answer.status_code in (404, 405), f"{path}: {answer.status_code} {answer.text}"


def test_a_wrong_method_is_refused(http):
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405, f"{answer.status_code} {answer.text}"


def test_errors_are_counted_by_who_failed(http, demo):
    before = total(demo.url, "tidegate_errors_total", by="client", kind="bad_request")
    http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    wait_for(
        'tidegate_errors_total{by="client",kind="bad_request"} after one more',
        lambda: total(demo.url, "tidegate_errors_total", by="client", kind="bad_request"),
        lambda n: n == before + 1,
    )
