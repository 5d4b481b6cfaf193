"""What is asked: requests in a fixed order, with all that an offline replay needs to know of them.

Prompts are token ids wherever possible, so that tokenizers play no part. A workload is the same, token for token, for every
policy and for the oracle: answers of the engines depend on the prompt alone, and are learnt beforehand.
"""

import json
import random
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Callable, Protocol

from fleet import BLOCK_SIZE, MODEL

# Ids of six digits, so that a prefix of so many bytes is one of so many tokens: `123456,` takes seven.
TOKEN_IDS = range(100_000, 128_000)
BYTES_PER_TOKEN = 7
# Blocks of the Mooncake traces, in tokens.
TRACE_BLOCK_TOKENS = 512

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One HTTP request, and the KV blocks that serving it fills."""

    path: str
    body: bytes
    prompt_tokens: int
    output_tokens: int
    # Names of the full blocks, of the prompt first and then of the answer; equal names for equal beginnings.
    chain: Tokens
    # The request whose answer this one needs.
    after: int | None = None
    # When it is sent, from the start on; at once when its turn comes if None.
    at_s: float | None = None

    @property
    def reusable_blocks(self) -> int:
        """Blocks of the prompt that a cache can supply: engines always compute the last token themselves."""
        return (self.prompt_tokens - 1) // BLOCK_SIZE

    @property
    def slots(self) -> int:
        """Blocks that it fills, full or not. The last output token is never computed."""
        return -(-(self.prompt_tokens + self.output_tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent."""

    name: str
    requests: list[Request]
    # `prefix_routing.max_prefix_length`: as much as tells these prompts apart, and no more.
    prefix_bytes: int

    @property
    def working_set_blocks(self) -> int:
        """Different blocks of all requests."""
        return len({block for request in self.requests for block in request.chain})

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)


class Chains:
    """Names blocks: the same name for the same tokens after the same beginning."""

    def __init__(self):
        self.names: dict[tuple[int, Tokens], int] = {}

    def of(self, tokens: Tokens) -> Tokens:
        parent, chain = -1, []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            key = (parent, tokens[end - BLOCK_SIZE : end])
            parent = self.names.setdefault(key, len(self.names))
            chain.append(parent)
        return tuple(chain)


def completion(prompt: Tokens, output_tokens: int, chain: Tokens, **when) -> Request:
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text = json.dumps(body, separators=(",", ":")).encode()
    return Request("/v1/completions", text, len(prompt), output_tokens, chain, **when)


def random_tokens(chance: random.Random, count: int) -> Tokens:
    return tuple(chance.choices(TOKEN_IDS, k=count))


@dataclass(frozen=True)
class Talk:
    """The shape of multi-turn conversations."""

    conversations: int
    turns: int
    opening_tokens: int
    follow_up_tokens: int
    answer_tokens: int


class Dialogue(Protocol):
    """One conversation as a client keeps it."""

    def ask(self, new_tokens: int, answer_tokens: int) -> tuple[Tokens, Callable[..., Request]]:
        """Adds the user's next words: the prompt's tokens, and how to make the request from its chain."""

    def answer(self, answer_tokens: int) -> None:
        """Adds the engine's answer to the prompt."""


def turn_order(talk: Talk, apart: int, chance: random.Random) -> list[int]:
    """Whose turn it is: random, but nobody's again within `apart` requests, as users read before they reply."""
    left = {conversation: talk.turns for conversation in range(talk.conversations)}
    recent: deque[int] = deque(maxlen=max(1, min(apart, talk.conversations // 2)))
    order = []
    while left:
        free = [conversation for conversation in left if conversation not in recent]
        # at the very end only those that have just spoken are left
        conversation = chance.choice(free) if free else next(c for c in recent if c in left)
        recent.append(conversation)
        order.append(conversation)
        left[conversation] -= 1
        if not left[conversation]:
            del left[conversation]
    return order


def conversations(name: str, talk: Talk, order: list[int], dialogues: list[Dialogue], prefix_bytes: int) -> Workload:
    """Each turn's prompt is the earlier prompt, its answer, and new words."""
    chains = Chains()
    turns: dict[int, list[tuple[Tokens, Callable[..., Request]]]] = {}
    for conversation, dialogue in enumerate(dialogues):
        for turn in range(talk.turns):
            new_tokens = talk.follow_up_tokens if turn else talk.opening_tokens
            turns.setdefault(conversation, []).append(dialogue.ask(new_tokens, talk.answer_tokens))
            if turn + 1 < talk.turns:
                dialogue.answer(talk.answer_tokens)
    requests: list[Request] = []
    said = [0] * talk.conversations
    last: dict[int, int] = {}
    for index, conversation in enumerate(order):
        turn = said[conversation]
        prompt, request = turns[conversation][turn]
        following = turns[conversation][turn + 1][0] if turn + 1 < talk.turns else prompt
        # the next prompt begins with this one and its answer, of which the last token has no keys and values
        held = following[: len(prompt) + talk.answer_tokens - 1]
        requests.append(request(chain=chains.of(held), after=last.get(conversation)))
        said[conversation] += 1
        last[conversation] = index
    return Workload(name, requests, prefix_bytes)


@dataclass(frozen=True)
class Systems:
    """The shape of prompts that share system prompts."""

    requests: int
    systems: int
    system_tokens: range
    tail_tokens: range
    answer_tokens: int
    zipf_exponent: float = 1.0


def shared_systems(name: str, shape: Systems, chance: random.Random, prefix_bytes: int) -> Workload:
    """Few system prompts are popular and many are rare; what follows them is never seen again."""
    chains = Chains()
    systems = [random_tokens(chance, chance.choice(shape.system_tokens)) for _ in range(shape.systems)]
    weights = list(accumulate(1 / (rank + 1) ** shape.zipf_exponent for rank in range(shape.systems)))
    requests = []
    for _ in range(shape.requests):
        system = chance.choices(systems, cum_weights=weights)[0]
        prompt = system + random_tokens(chance, chance.choice(shape.tail_tokens))
        requests.append(completion(prompt, shape.answer_tokens, chains.of(prompt)))
    return Workload(name, requests, prefix_bytes)


@dataclass(frozen=True)
class Hot:
    """The shape of a service with one system prompt, beside prompts that nobody repeats."""

    requests: int
    # Requests before the hot one appears: it meets a fleet at work, and is nowhere yet.
    others_first: int
    share: float
    system_tokens: int
    tail_tokens: range
    other_tokens: range
    answer_tokens: int


def hot_system(name: str, shape: Hot, chance: random.Random, prefix_bytes: int) -> Workload:
    """Most prompts begin with the same system prompt: too many for one engine, so that it pays to compute it on each."""
    chains = Chains()
    system = random_tokens(chance, shape.system_tokens)
    requests = []
    for index in range(shape.requests):
        if index >= shape.others_first and chance.random() < shape.share:
            prompt = system + random_tokens(chance, chance.choice(shape.tail_tokens))
        else:
            prompt = random_tokens(chance, chance.choice(shape.other_tokens))
        requests.append(completion(prompt, shape.answer_tokens, chains.of(prompt)))
    return Workload(name, requests, prefix_bytes)


@dataclass(frozen=True)
class Scale:
    """How a trace is made small."""

    requests: int
    block_tokens: int
    answer_tokens: int
    speed_up: float


def mooncake(name: str, path: Path, scale: Scale, prefix_bytes: int) -> Workload:
    """The first requests of a trace in Mooncake's format, each of its blocks as so many tokens that follow from its hash id."""
    chains = Chains()
    requests = []
    with path.open() as lines:
        for _, line in zip(range(scale.requests), lines):
            entry = json.loads(line)
            tokens = [token for hash_id in entry["hash_ids"] for token in trace_block(hash_id, scale.block_tokens)]
            length = max(1, round(entry["input_length"] * scale.block_tokens / TRACE_BLOCK_TOKENS))
            prompt = tuple(tokens[:length])
            answer = max(1, min(scale.answer_tokens, entry["output_length"]))
            at_s = entry["timestamp"] / 1000 / scale.speed_up
            requests.append(completion(prompt, answer, chains.of(prompt), at_s=at_s))
    return Workload(name, requests, prefix_bytes)


def trace_block(hash_id: int, tokens: int) -> Tokens:
    return random_tokens(random.Random(hash_id), tokens)
