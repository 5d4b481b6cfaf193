"""The official `openai` client against the gateway: each call that it knows how to make."""

import base64
import json
import struct

import pytest

from conftest import MODEL
from metrics import total, wait_for

HELLO = [{"role": "user", "content": "Name three rivers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
BY_NAME = {"type": "function", "function": {"name": "get_weather"}}


# ── Models ────────────────────────────────────────────────────────────────────


def test_the_list_of_models_names_each_model_once(client):
    names = [model.id for model in client.models.list()]
    assert names == [MODEL], f"six backends serve one model, and the list is {names}"


def test_a_model_is_retrieved_by_its_name_with_a_slash_in_it(client):
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object) == (MODEL, "model")


@pytest.mark.parametrize("path", [MODEL, MODEL.replace("/", "%2F")], ids=["plain slash", "encoded slash"])
def test_a_model_is_found_however_its_slash_is_written(http, path):
    answer = http.get(f"/v1/models/{path}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == MODEL, answer.text


# ── Chat ──────────────────────────────────────────────────────────────────────


def test_a_chat_answers_with_text_and_usage(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12)
    assert answer.object == "chat.completion", answer
    assert answer.model == MODEL, answer
    [choice] = answer.choices
    assert choice.message.role == "assistant", answer
    assert choice.message.content, f"no text: {answer}"
    assert choice.finish_reason in ("stop", "length"), answer
    assert answer.usage.prompt_tokens > 0, answer.usage
    assert 0 < answer.usage.completion_tokens <= 12, answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage


def test_max_completion_tokens_is_handed_on(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3, answer.usage


def test_a_chat_with_several_choices_gets_them_all(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, n=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2], answer


def test_a_streamed_chat_comes_in_chunks_and_without_usage(client):
    with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True) as stream:
        chunks = list(stream)
    assert len(chunks) >= 3, f"one piece of text at a time was expected: {chunks}"
    assert len({chunk.id for chunk in chunks}) == 1, f"one id for the whole stream: {[c.id for c in chunks]}"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(chunk.choices) == 1 for chunk in chunks), f"a chunk without a choice, though no usage was asked for: {chunks}"
    assert all(chunk.usage is None for chunk in chunks), f"usage that nobody asked for: {[c.usage for c in chunks]}"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks), f"no text in {chunks}"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] in ("stop", "length"), f"the last chunk must say why it ended: {reasons}"
    assert not any(reasons[:-1]), f"only the last one: {reasons}"


def test_usage_is_streamed_when_it_is_asked_for(client):
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *before, last = stream
    assert last.choices == [], f"the usage chunk has no choices: {last}"
    assert last.usage is not None and last.usage.completion_tokens > 0, last
    assert all(chunk.usage is None for chunk in before), "usage comes once, at the end"


def test_a_stream_and_a_whole_answer_count_the_same_prompt(client):
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *_, last = stream
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_text_outside_of_ascii_survives_the_way_in(client):
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "강 세 개를 말해 줘 🌊"}], max_tokens=4)
    assert answer.choices[0].message.content, answer


# ── Tools ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tool_choice", ["required", BY_NAME], ids=["required", "by name"])
def test_a_tool_call_is_answered(client, tool_choice):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=tool_choice, max_tokens=200
    )
    [choice] = answer.choices
    assert choice.message.tool_calls, f"no tool call: {answer}"
    call = choice.message.tool_calls[0]
    assert call.id, call
    assert call.function.name == "get_weather", call
    assert isinstance(json.loads(call.function.arguments), dict), call
    # vLLM says `stop` when the function was named.
    assert choice.finish_reason in ("tool_calls", "stop"), answer


@pytest.mark.parametrize("tool_choice", ["required", BY_NAME], ids=["required", "by name"])
def test_a_streamed_tool_call_merges_into_one_call(client, tool_choice):
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=tool_choice, max_tokens=200, stream=True
    ) as stream:
        deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert deltas, "no tool call delta in the whole stream"
    first = [delta for delta in deltas if delta.index == 0]
    names = [delta.function.name for delta in first if delta.function and delta.function.name]
    assert names == ["get_weather"], f"the name comes once: {deltas}"
    assert len([delta.id for delta in first if delta.id]) == 1, f"the id comes once: {deltas}"
    arguments = "".join(delta.function.arguments or "" for delta in first if delta.function)
    assert isinstance(json.loads(arguments), dict), f"the arguments are {arguments!r}"


# ── Completions ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("Once upon a time", 1),
        (["Once upon a time", "It was a dark night"], 2),
        ([9906, 1917, 11, 420, 374], 1),
        ([[9906, 1917], [420, 374, 264]], 2),
    ],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_a_completion_takes_every_shape_of_prompt(client, prompt, choices):
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert answer.object == "text_completion", answer
    assert sorted(choice.index for choice in answer.choices) == list(range(choices)), answer
    assert all(choice.text for choice in answer.choices), answer
    assert answer.usage.prompt_tokens > 0, answer.usage


def test_token_ids_are_counted_as_given(client):
    answer = client.completions.create(model=MODEL, prompt=[9906, 1917, 11, 420, 374], max_tokens=1)
    assert answer.usage.prompt_tokens == 5, answer.usage


def test_a_streamed_completion_comes_in_chunks(client):
    with client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks), chunks
    assert chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1]


# ── Embeddings ────────────────────────────────────────────────────────────────


def test_an_embedding_is_a_list_of_numbers_for_each_input(client):
    answer = client.embeddings.create(model=MODEL, input=["a river", "a mountain"], encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1], [item.index for item in answer.data]
    lengths = {len(item.embedding) for item in answer.data}
    assert len(lengths) == 1 and lengths.pop() > 0, "every embedding has the same length"
    assert all(isinstance(x, float) for x in answer.data[0].embedding[:8]), answer.data[0].embedding[:8]
    assert answer.usage.prompt_tokens > 0, answer.usage


def test_an_embedding_in_base64_is_the_same_as_in_numbers(client):
    numbers = client.embeddings.create(model=MODEL, input="a river", encoding_format="float").data[0].embedding
    packed = client.embeddings.create(model=MODEL, input="a river", encoding_format="base64").data[0].embedding
    raw = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(numbers, abs=1e-6)


# ── Headers ───────────────────────────────────────────────────────────────────


def test_the_request_id_of_the_client_is_echoed(client):
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=2, extra_headers={"x-request-id": "from-the-client-1"}
    )
    assert answer.headers.get("x-request-id") == "from-the-client-1", dict(answer.headers)


def test_a_request_id_is_made_where_the_client_sends_none(http):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    ids = {http.post("/v1/chat/completions", json=body).headers.get("x-request-id") for _ in range(2)}
    assert None not in ids and len(ids) == 2, f"two requests, two ids: {ids}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_says_who_gave_it_and_how_that_one_was_chosen(http, stream):
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-tidegate-backend"), dict(answer.headers)
    route = answer.headers.get("x-tidegate-route", "").split(";")[0].strip()
    assert route in ("prefix", "strategy", "kv_index", "cache_hit"), dict(answer.headers)


def test_a_shared_prefix_stays_on_one_backend(http, demo):
    system = {"role": "system", "content": "You are a patient guide to the rivers of the world. " * 20}
    seen = set()
    for _ in range(6):
        # A request that is still counted would be load, and load above the bound may move the next one.
        wait_for("requests in flight", lambda: total(demo.url, "tidegate_in_flight_requests"), lambda n: n == 0)
        body = {"model": MODEL, "messages": [system, *HELLO], "max_tokens": 2}
        seen.add(http.post("/v1/chat/completions", json=body).headers.get("x-tidegate-backend"))
    assert len(seen) == 1, f"six equal prompts, one after another, went to {seen}"


def test_a_streamed_answer_is_an_event_stream_that_ends_with_done(http):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream"), dict(answer.headers)
    events = [event for event in answer.text.split("\n\n") if event]
    assert all(event.startswith("data: ") for event in events), answer.text
    assert events[-1] == "data: [DONE]" and events.count("data: [DONE]") == 1, answer.text


def test_the_client_reads_a_raw_stream_with_its_headers(client):
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HELLO, max_tokens=4, stream=True, extra_headers={"x-request-id": "from-the-client-2"}
    ) as answer:
        assert answer.headers.get("x-request-id") == "from-the-client-2", dict(answer.headers)
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines
