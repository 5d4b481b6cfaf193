"""Engines' KV events over ZeroMQ at a rate, in vLLM's form, as a process of its own: see `events`.

    publisher.py PORT...

Says a line when every port has its subscriber and one chain was sent; then, for each line `RATE SECONDS` that it reads,
sends so many blocks a second in all and answers with `BLOCKS SECONDS`, what it sent and how long that took. Ends when its
input ends.

Frames: topic, sequence number (8 bytes, big-endian), and a msgpack batch [time, events, rank]. An event stores or removes a
chain of 64 blocks; what was stored is removed `LIVE` chains later, so that the index stays as large as it is. All payloads
are encoded beforehand, and used again once their chain is gone.
"""

import sys
import time

BLOCKS_PER_CHAIN = 64
BLOCK_SIZE = 16
# Chains of a stream that are there at one time, and chains that there are.
LIVE = 64
CHAINS = 128
TOPIC = b""
NEVER_DROP = 0  # no high-water mark: the router is to be too slow, not to miss something
LONGEST_NAP_S = 0.002


def missing() -> str | None:
    """What has to be installed, if anything."""
    try:
        import msgpack  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        return f"the curve `events` needs pyzmq and msgpack ({error.name} is missing): use .venv/bin/python after ./test.sh"
    return None


def payloads(stream: int, chain: int) -> tuple[bytes, bytes]:
    """The batch that stores a chain, and the one that removes it."""
    import msgpack

    name = (stream * CHAINS + chain + 1) * BLOCKS_PER_CHAIN
    hashes = [(name + block) * 0x9E37_79B9_7F4A_7C15 % 2**64 for block in range(BLOCKS_PER_CHAIN)]
    tokens = [(name + i * 7919) % 150_000 for i in range(BLOCKS_PER_CHAIN * BLOCK_SIZE)]
    now = time.time()
    stored = ["BlockStored", hashes, None, tokens, BLOCK_SIZE, None, "GPU", None]
    return msgpack.packb([now, [stored], 0]), msgpack.packb([now, [["BlockRemoved", hashes, "GPU"]], 0])


class Stream:
    """One engine's socket, and where it is in its turns."""

    def __init__(self, context, port: int, number: int):
        import zmq

        self.socket = context.socket(zmq.XPUB)  # a PUB that hears of subscribers
        self.socket.set(zmq.SNDHWM, NEVER_DROP)
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.payloads = [payloads(number, chain) for chain in range(CHAINS)]
        self.seq = 0
        self.stored = 0
        self.removed = 0

    def wait_for_subscriber(self) -> None:
        while self.socket.recv()[:1] != b"\x01":
            pass

    def send_next(self) -> None:
        """Stores a chain, or removes the oldest where enough are there."""
        if self.stored - self.removed >= LIVE:
            payload = self.payloads[self.removed % CHAINS][1]
            self.removed += 1
        else:
            payload = self.payloads[self.stored % CHAINS][0]
            self.stored += 1
        self.socket.send_multipart([TOPIC, self.seq.to_bytes(8, "big"), payload], copy=True)
        self.seq += 1


def send(streams: list[Stream], rate: float, seconds: float) -> tuple[int, float]:
    """Blocks that were sent, one message after the other as the clock says, and how long that took."""
    total = int(rate * seconds / BLOCKS_PER_CHAIN)
    begun = time.monotonic()
    for message in range(total):
        due = begun + message * BLOCKS_PER_CHAIN / rate
        while (early := due - time.monotonic()) > 0:
            time.sleep(min(early, LONGEST_NAP_S))
        streams[message % len(streams)].send_next()
    return total * BLOCKS_PER_CHAIN, time.monotonic() - begun


def main(ports: list[int]) -> None:
    import zmq

    context = zmq.Context()
    streams = [Stream(context, port, number) for number, port in enumerate(ports)]
    print("bound", flush=True)
    for stream in streams:
        stream.wait_for_subscriber()
        stream.send_next()  # from the first event on its block size is known
    print("subscribed", flush=True)
    for line in sys.stdin:
        rate, seconds = map(float, line.split())
        blocks, took = send(streams, rate, seconds)
        print(blocks, took, flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    main([int(port) for port in sys.argv[1:]])
