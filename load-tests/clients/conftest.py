"""Starts the demo (six simulated engines and the gateway) once for all tests, on ports of its own.

TIDEGATE_DEMO_BIN names the program; without it, target/debug/demo of this repository.
"""

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
ENGINES = 6

READY_WITHIN_S = 45  # a debug build on a busy machine reads its tokenizer in a few seconds
STOP_WITHIN_S = 40  # longer than the router's drain limit of 30 s
LOG_TAIL_BYTES = 6000


def pytest_configure():
    # A terminated run ends like an interrupted one, so that the demo is stopped too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@dataclass(frozen=True)
class Demo:
    """A running demo: where to reach it."""

    port: int
    engine_port_base: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.engine_port_base + i}" for i in range(ENGINES)]


def free_ports() -> tuple[int, int]:
    """A free port for the gateway, and the first of six free ones in a row for the engines.

    Below the range from which the system takes ports for outgoing connections, so that none of those
    gets in between this check and the demo's bind.
    """
    count = ENGINES + 1
    start = 20000 + os.getpid() % 500 * 20
    for first in range(start, 32000, count):
        taken = []
        try:
            for port in range(first, first + count):
                taken.append(socket.create_server(("127.0.0.1", port)))
            return first, first + 1
        except OSError:
            continue
        finally:
            for server in taken:
                server.close()
    raise AssertionError(f"no {count} free ports in a row from {start} on")


def tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") or "(nothing)"


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    last = "no answer yet"
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            pytest.fail(f"the demo ended with {code} before it was ready. Its output:\n{tail(log)}", pytrace=False)
        try:
            answer = httpx.get(f"{url}/ready", timeout=2)
            if answer.status_code == 200:
                return
            last = f"{answer.status_code} {answer.text[:300]}"
        except httpx.HTTPError as error:
            last = repr(error)
        time.sleep(0.1)
    pytest.fail(f"the demo was not ready in {READY_WITHIN_S} s; /ready last said: {last}. Its output:\n{tail(log)}", pytrace=False)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The running demo. Stopped with SIGINT at the end, which must make it exit with 0."""
    binary = Path(os.environ.get("TIDEGATE_DEMO_BIN", "target/debug/demo"))
    if not binary.is_absolute():
        binary = REPOSITORY / binary
    if not binary.is_file():
        pytest.fail(f"{binary} is not there: run `cargo build --bin demo`, or set TIDEGATE_DEMO_BIN", pytrace=False)

    log = tmp_path_factory.mktemp("demo") / "output.log"
    port, engine_port_base = free_ports()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [binary, "--port", str(port), "--engine-port-base", str(engine_port_base)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        running = Demo(port, engine_port_base)
        wait_until_ready(running.url, process, log)
        yield running

        died = process.poll()
        assert died is None, f"the demo ended by itself with {died} during the tests. Its output:\n{tail(log)}"
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the demo still ran {STOP_WITHIN_S} s after SIGINT. Its output:\n{tail(log)}", pytrace=False)
        assert code == 0, f"the demo exited with {code} after SIGINT. Its output:\n{tail(log)}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def client(demo):
    """The official client, without its own retries: a retry would hide what the gateway did."""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def http(demo):
    """Plain HTTP, for what the official client would not send."""
    with httpx.Client(base_url=demo.url, timeout=30) as http:
        yield http
