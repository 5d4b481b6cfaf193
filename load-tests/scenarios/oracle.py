"""What the best placement could have done: plays requests onto caches like the engines', without any engine.

The oracle knows at every request what each cache holds, and that at no cost and without delay. It is greedy, as the best
placement over all future requests cannot be computed; so several greedy rules are played and the best one counts.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Iterable, Sequence

from fleet import BLOCK_SIZE
from workloads import Request

# How far above the mean the busiest worker's work may be: a placement beyond it has traded balance for hits.
IMBALANCE_MAX = 1.25
# An overlap below this share of a prompt does not bind it to a worker. With 0 alone, a few tokens that all prompts begin
# with would draw all of them to one worker.
MIN_SHARES = (0.0, 0.1, 0.3, 0.5)


class BlockCache:
    """An engine's KV cache: least recently used blocks go first, and of one prompt its tail goes before its head."""

    def __init__(self, size: int | None):
        self.size = size
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.nameless = count(-1, -1)

    def overlap(self, request: Request) -> int:
        """Leading blocks that it has."""
        reusable = request.chain[: request.reusable_blocks]
        return sum(1 for _ in takewhile(self.blocks.__contains__, reusable))

    def serve(self, request: Request) -> int:
        """Takes a request in; answers how many blocks were there."""
        hits = self.overlap(request)
        for block in request.chain:
            self.blocks.pop(block, None)  # in use, so not among those that make room
        if self.size is not None:
            while self.blocks and len(self.blocks) + request.slots > self.size:
                self.blocks.popitem(last=False)
        for _ in range(request.slots - len(request.chain)):
            self.blocks[next(self.nameless)] = None  # begun, never full: takes room and is never found
        for block in reversed(request.chain):
            self.blocks[block] = None
        return hits


@dataclass(frozen=True)
class Rule:
    """Greedy: the longest cached prefix, among equals the least work so far."""

    min_share: float
    # Workers beyond so many times the mean are left out; none: nobody is.
    balance: float | None


RULES = [Rule(share, balance) for share in MIN_SHARES for balance in (IMBALANCE_MAX, None)]


@dataclass(frozen=True)
class Outcome:
    """What a placement came to."""

    hit_tokens: int
    work: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        return imbalance(self.work)


def imbalance(work: Sequence[int]) -> float:
    """The busiest worker's work against the mean."""
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def play(requests: Iterable[Request], workers: int, size: int | None, rule: Rule) -> Outcome:
    """Places each request by a rule, in order."""
    caches = [BlockCache(size) for _ in range(workers)]
    work = [0] * workers
    hit_tokens = 0
    for request in requests:
        worker = pick(request, caches, work, rule)
        hit = caches[worker].serve(request) * BLOCK_SIZE
        hit_tokens += hit
        work[worker] += request.prompt_tokens - hit + request.output_tokens
    return Outcome(hit_tokens, tuple(work))


def pick(request: Request, caches: list[BlockCache], work: list[int], rule: Rule) -> int:
    limit = None if rule.balance is None else rule.balance * sum(work) / len(work)
    allowed = [worker for worker in range(len(caches)) if limit is None or work[worker] <= limit]
    overlaps = {worker: caches[worker].overlap(request) for worker in allowed}
    enough = rule.min_share * request.prompt_tokens / BLOCK_SIZE
    return max(allowed, key=lambda w: (overlaps[w] if overlaps[w] >= enough else 0, -work[w]))


def replay(requests: Sequence[Request], workers: Sequence[int], size: int) -> int:
    """Hit tokens if each request goes where it went in truth: far from what was measured, the model would be wrong."""
    caches: dict[int, BlockCache] = {}
    hits = 0
    for request, worker in zip(requests, workers):
        hits += caches.setdefault(worker, BlockCache(size)).serve(request)
    return hits * BLOCK_SIZE


@dataclass(frozen=True)
class Bounds:
    """What could be had."""

    # The best greedy rule that keeps the balance: the denominator.
    best: Outcome
    best_rule: Rule
    # The best one, balanced or not.
    unbalanced: Outcome
    # One cache as large as all together: no placement, no copies.
    pooled_hit_tokens: int
    # A cache that never forgets: all there is to reuse.
    endless_hit_tokens: int


def bounds(requests: Sequence[Request], workers: int, size: int) -> Bounds:
    """Plays all rules. A rule counts as balanced by what came of it, whether it minded the balance or not."""
    played = [(rule, play(requests, workers, size, rule)) for rule in RULES]
    # a limit that is minded at each choice may be passed by the last one
    balanced = [(rule, out) for rule, out in played if rule.balance or out.imbalance <= IMBALANCE_MAX]
    best_rule, best = max(balanced, key=lambda pair: pair[1].hit_tokens)
    alone = Rule(0.0, None)
    return Bounds(
        best=best,
        best_rule=best_rule,
        unbalanced=max((out for _, out in played), key=lambda out: out.hit_tokens),
        pooled_hit_tokens=play(requests, 1, size * workers, alone).hit_tokens,
        endless_hit_tokens=play(requests, 1, None, alone).hit_tokens,
    )
