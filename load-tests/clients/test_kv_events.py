"""The simulated engine's ZeroMQ events, read as vLLM's own example subscriber reads them, with libzmq and msgpack.

TIDEGATE_ENGINE_SIM_BIN names the program; without it, debug/engine-sim of cargo's target directory.
"""

import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgpack
import pytest
import zmq

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
END_SEQ = (-1).to_bytes(8, "big", signed=True)

READY_WITHIN_S = 30  # a debug build on a busy machine reads its tokenizer in a few seconds
STOP_WITHIN_S = 10
PATIENCE_S = 20


def binary() -> Path:
    built = f"{os.environ.get('CARGO_TARGET_DIR', 'target')}/debug/engine-sim"
    path = Path(os.environ.get("TIDEGATE_ENGINE_SIM_BIN", built))
    path = path if path.is_absolute() else REPOSITORY / path
    if not path.is_file():
        pytest.fail(f"{path} is not there: run `cargo build --bin engine-sim`, or set TIDEGATE_ENGINE_SIM_BIN", pytrace=False)
    return path


def free_ports(count: int) -> list[int]:
    """Free ports below the range from which the system takes ports for outgoing connections."""
    found = []
    for port in range(15000 + os.getpid() % 400 * 10, 20000):
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


class Engine:
    """A running engine and its sockets, with vLLM's roles: SUB for what happens, DEALER for what happened."""

    def __init__(self, http_port: int, live_port: int, replay_port: int, context: zmq.Context):
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=30)
        self.live = context.socket(zmq.SUB)
        self.live.connect(f"tcp://127.0.0.1:{live_port}")
        self.live.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        self.replay_url = f"tcp://127.0.0.1:{replay_port}"
        self.context = context
        self.asked = 0

    def ask(self) -> str:
        """Sends a prompt of several blocks that nobody has sent before."""
        self.asked += 1
        prompt = f"{self.asked} " + "The server shares the prompt with the worker. " * 20
        answer = self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
        answer.raise_for_status()
        return prompt

    def receive(self, within_s: float = PATIENCE_S) -> tuple[int, bytes] | None:
        """One live message: number and payload."""
        if not self.live.poll(within_s * 1000):
            return None
        topic, seq, payload = self.live.recv_multipart()
        assert topic == b"kv-events@sim"
        return int.from_bytes(seq, "big"), payload

    def replay(self, start: int, with_topic: bool) -> list[tuple[int, bytes]]:
        """What the engine repeats from `start` on, up to its end marker."""
        dealer = self.context.socket(zmq.DEALER)
        try:
            dealer.connect(self.replay_url)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            messages = []
            while True:
                assert dealer.poll(PATIENCE_S * 1000), "the replay has no end"
                delimiter, *topic, seq, payload = dealer.recv_multipart()
                assert delimiter == b""
                assert topic == ([b"kv-events@sim"] if with_topic else [])
                if seq == END_SEQ:
                    assert payload == b""
                    return messages
                messages.append((int.from_bytes(seq, "big"), payload))
        finally:
            dealer.close(linger=0)


@contextmanager
def engine(*flags: str):
    http_port, live_port, replay_port = free_ports(3)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{live_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": "kv-events@sim",
    }
    command = [
        binary(), "serve", "sim-model", "--host", "127.0.0.1", "--port", str(http_port), "--max-model-len", "4096",
        "--block-size", str(BLOCK_SIZE), "--sim-time-scale", "0.001", "--kv-events-config", json.dumps(events), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    context = zmq.Context()
    try:
        running = Engine(http_port, live_port, replay_port, context)
        wait_until_ready(running, process)
        yield running

        running.http.close()
        process.terminate()
        assert process.wait(STOP_WITHIN_S) == 0
    finally:
        context.destroy(linger=0)
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(running: Engine, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the engine ended with {process.returncode}"
        try:
            if running.http.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    pytest.fail(f"the engine was not ready in {READY_WITHIN_S} s")


def first_message(running: Engine) -> tuple[int, bytes]:
    """PUB drops what comes before the subscription has arrived, so asks until something is seen."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        running.ask()
        if message := running.receive(within_s=0.1):
            return message
    pytest.fail("no event arrives")


def as_map(event) -> dict:
    """Either encoding of an event as a map; what an array leaves open at its end is None."""
    if isinstance(event, dict):
        return {"parent_block_hash": None, **event}
    names = {
        "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"],
        "BlockRemoved": ["block_hashes", "medium"],
        "AllBlocksCleared": [],
    }[event[0]]
    return {"type": event[0], **dict(zip(names, [*event[1:], *[None] * len(names)]))}


@pytest.mark.parametrize("encoding", ["oldest", "array", "map"])
@pytest.mark.parametrize("form", ["int", "bytes"])
def test_a_subscriber_reads_each_encoding(encoding, form):
    with engine("--sim-kv-events-encoding", encoding, "--sim-kv-events-hash", form) as running:
        seq, payload = first_message(running)
        replayed = dict(running.replay(0, with_topic=True))
        assert replayed[seq] == payload
        for payload in replayed.values():
            ts, events, *rank = msgpack.unpackb(payload)
            assert abs(ts - time.time()) < 3600
            assert rank == ([] if encoding == "oldest" else [0])
            for event in events:
                assert isinstance(event, dict) == (encoding == "map")
                event = as_map(event)
                assert event["type"] == "BlockStored"
                assert event["medium"] == (None if encoding == "oldest" else "GPU")
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                for block in event["block_hashes"]:
                    assert isinstance(block, int) if form == "int" else (isinstance(block, bytes) and len(block) == 32)


def test_stored_tokens_are_those_of_the_prompt():
    with engine() as running:
        prompt = running.ask()
        tokens = running.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        stored = [
            as_map(event) for _, payload in running.replay(0, with_topic=True) for event in msgpack.unpackb(payload)[1]
        ]
        parents = [event["parent_block_hash"] for event in stored]
        assert parents == [None, *[event["block_hashes"][-1] for event in stored[:-1]]]
        full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        announced = [token for event in stored for token in event["token_ids"]]
        assert full >= 3 * BLOCK_SIZE and announced[:full] == tokens[:full]


def test_a_gap_is_filled_by_a_replay():
    with engine("--sim-kv-events-drop-every", "3", "--sim-kv-events-replay-framing", "old") as running:
        seq, _ = first_message(running)
        seen, filled = seq, []
        for _ in range(6):
            running.ask()
        while not filled:
            message = running.receive()
            assert message, "no event arrives"
            if message[0] > seen + 1:
                assert message[0] == seen + 2
                filled = running.replay(seen + 1, with_topic=False)
            seen = message[0]
        numbers = [number for number, _ in filled]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (numbers[0] + 1) % 3 == 0, "every third batch is missing"


def test_the_http_form_needs_no_flag_and_resumes():
    with engine() as running:
        for _ in range(3):
            running.ask()
        last = running.replay(0, with_topic=True)[-1][0]
        with running.http.stream("GET", "/v1/kv_events", headers={"Last-Event-ID": "0"}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            ids = []
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    ids.append(int(line.removeprefix("id: ")))
                if line.startswith("data: "):
                    batch = json.loads(line.removeprefix("data: "))
                    assert batch["seq"] == ids[-1] and batch["dp_rank"] == 0
                    assert {event["type"] for event in batch["events"]} <= {"cache_created", "cache_evicted"}
                    if batch["seq"] == last:
                        break
        assert ids == list(range(1, last + 1))
