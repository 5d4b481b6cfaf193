"""What a long prompt costs the router in CPU: the first turn of a conversation, and its next turn.

    python3 load-tests/scenarios/prompt_cost.py --bin target/release --tokenizer DIR

The engines are stand-ins that answer at once, so that nearly all CPU is the router's; it is read from the process, with
what goes on after the answer: a prompt that is not encoded in time is encoded to its end. `--tokenizer` names a directory
with a real tokenizer.json and chat template; the figures depend on the vocabulary. The same bodies with the index switched
off show what passing them on costs anyway.
"""

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fleet import stop
from process_cpu import cpu_s

MODEL = "model"
BLOCK_SIZE = 16
NEW_TOKENS = 200  # of a next turn
SIZES = {1_000: 200, 8_000: 60, 100_000: 12}  # tokens of a prompt, and conversations measured
PAUSE_S_PER_TOKEN = 5e-6
QUIET_S = 0.5
QUIET_CPU_S = 0.005  # in that time: health probes and timers
SMALL_REQUESTS = 300
SMALL_PAUSE_S = 0.005
LONG_PROMPTS = 60
DEADLINE_S = 60
WORDS = (
    "the tide comes in over sand and stone while boats wait at their ropes for water enough to leave harbour again "
    "because nobody who knows this coast would trust a chart older than last winter's storms or sail by night alone"
).split()


class Engine(BaseHTTPRequestHandler):
    """Answers every request at once, and announces one block so that its block size is known."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one write

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path == "/v1/kv_events" and "upgrade" not in {k.lower() for k in self.headers}:
            event = {
                "type": "cache_created", "block_hashes": [1], "parent_block_hash": None,
                "token_ids": list(range(BLOCK_SIZE)), "block_size": BLOCK_SIZE, "medium": "GPU",
            }  # fmt: skip
            batch = json.dumps({"seq": 0, "ts": 1.0, "events": [event]})
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"id: 0\ndata: {batch}\n\n".encode())
            self.wfile.flush()
            self.server.stopped.wait()
            self.close_connection = True
        else:
            self.answer(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        self.answer(200, json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # the router has closed a connection that it no longer needs


def start_engine():
    server = Server(("127.0.0.1", 0), Engine)
    server.stopped = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def off(engines, tokenizer):
    """Settings of the index: none."""
    return {"enabled": False}


def by_text(engines, tokenizer):
    """The index guesses from what was sent where, by the prompts' text."""
    return {"enabled": True}


def exact(engines, tokenizer):
    """The index hears the engines, and prompts are tokenised."""
    return {
        "enabled": True,
        "parity_check": False,
        "tokenizers": {MODEL: str(tokenizer)},
        "event_sources": [
            {"backend_name": f"e{n}", "endpoint": f"http://127.0.0.1:{engine.server_port}/v1/kv_events"}
            for n, engine in enumerate(engines)
        ],
    }


class Router:
    """The router in front of such engines, with these settings of the index."""

    def __init__(self, binary, index, engines, folder):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        urls = [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
        settings = {
            "server": {"host": "127.0.0.1", "port": self.port, "workers": 1},
            "logging": {"access": False},
            "health_checks": {"interval": "10s", "timeout": "5s"},
            "backends": [{"name": f"e{n}", "url": url, "models": [MODEL]} for n, url in enumerate(urls)],
            "kv_cache_index": index,
        }
        path = Path(folder) / f"router-{self.port}.json"
        path.write_text(json.dumps(settings))
        self.process = subprocess.Popen([binary, "--config", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.wait_until(lambda: b'"ready":true' in self.get("/ready"))
            if "event_sources" in index:
                self.wait_until(lambda: self.get("/admin/kv-index").count(b'"mode":"exact"') == len(urls))
        except BaseException:
            self.stop()
            raise

    def get(self, path):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5).read()
        except OSError:
            return b""

    def wait_until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit("the router does not get ready")
            time.sleep(0.05)

    def post(self, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            answer.read()
            return answer.headers.get("x-tidegate-overlap")

    def settled_cpu_s(self):
        """CPU so far, once nothing is encoded any more."""
        before, since = cpu_s(self.process.pid), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            time.sleep(0.02)
            now = cpu_s(self.process.pid)
            if now - before > QUIET_CPU_S:
                before, since = now, time.monotonic()
        return cpu_s(self.process.pid)

    def stop(self):
        stop(self.process)


def text(chance, tokens):
    return " ".join(chance.choice(WORDS) for _ in range(tokens))  # these words are a token each


def conversations(tokens, count):
    """Bodies of first turns, and of the same with an answer and a new question behind them."""
    chance = random.Random(tokens)
    first, later = [], []
    for _ in range(count):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text(chance, tokens)}]
        body = {"model": MODEL, "messages": messages}
        first.append(json.dumps(body).encode())
        messages += [
            {"role": "assistant", "content": text(chance, NEW_TOKENS // 2)},
            {"role": "user", "content": text(chance, NEW_TOKENS // 2)},
        ]
        later.append(json.dumps(body).encode())
    return first, later


def measure(router, bodies, pause_s):
    """CPU in ms and wall time in ms for each of these bodies, with a pause between them to encode what came too late."""
    wall, start = 0.0, router.settled_cpu_s()
    for body in bodies:
        clock = time.monotonic()
        router.post(body)
        wall += time.monotonic() - clock
        time.sleep(pause_s)
    cpu = router.settled_cpu_s() - start
    return cpu / len(bodies) * 1000, wall / len(bodies) * 1000


def small_requests_ms(router):
    """Time of small requests, one after the other, in ms: the median, and the 99th percentile."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=DEADLINE_S)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    times = []
    for _ in range(SMALL_REQUESTS):
        clock = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body)
        connection.getresponse().read()
        times.append((time.perf_counter() - clock) * 1000)
        time.sleep(SMALL_PAUSE_S)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def beside_long_prompts(router):
    """The same alone, and while prompts of 100,000 tokens that are all new come one after the other."""
    alone = small_requests_ms(router)
    bodies, _ = conversations(100_000, LONG_PROMPTS)
    sender = threading.Thread(target=lambda: [router.post(body) for body in bodies], daemon=True)
    sender.start()
    beside = small_requests_ms(router)
    sender.join(DEADLINE_S)
    print(f"\nSmall requests, p50 and p99 in ms: {alone[0]:.2f} and {alone[1]:.2f} alone, ", end="")
    print(f"{beside[0]:.2f} and {beside[1]:.2f} beside {LONG_PROMPTS} new prompts of 100,000 tokens.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="target/release", help="where the router's binary is")
    parser.add_argument("--tokenizer", required=True, type=Path, help="directory of a tokenizer.json with its template")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer.resolve()
    engines = [start_engine(), start_engine()]
    print("| prompt tokens | index | first turn: CPU ms | wall ms | next turn: CPU ms | wall ms |")
    print("|---|---|---|---|---|---|")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for tokens, count in SIZES.items():
                for name, index in (("off", off), ("on", exact)):
                    router = Router(f"{arguments.bin}/tidegate", index(engines, tokenizer), engines, folder)
                    try:
                        first, later = conversations(tokens, count)
                        pause_s = tokens * PAUSE_S_PER_TOKEN
                        rows = [measure(router, first, pause_s), measure(router, later, pause_s)]
                    finally:
                        router.stop()
                    figures = " | ".join(f"{cpu:.2f} | {wall:.2f}" for cpu, wall in rows)
                    print(f"| {tokens:,} | {name} | {figures} |", flush=True)
            router = Router(f"{arguments.bin}/tidegate", exact(engines, tokenizer), engines, folder)
            try:
                beside_long_prompts(router)
            finally:
                router.stop()
    finally:
        for engine in engines:
            engine.stopped.set()
            engine.shutdown()


if __name__ == "__main__":
    sys.exit(main())
