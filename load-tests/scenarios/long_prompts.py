"""Long prompts that hardly share anything: what split serving is for. Token ids, so that tokenizers play no part."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Sequence

from paced import Shot
from workloads import Tokens, completion, random_tokens

# A prompt comes again after at least so many others, when it has been served, and before so many more have come.
AGAIN_AFTER = 16
AGAIN_WITHIN = 64
TAIL_TOKENS = 64


@dataclass(frozen=True)
class LongPrompts:
    """The shape of the requests."""

    prompt_tokens: range = range(4000, 8001)
    output_tokens: range = range(100, 201)
    # Share of requests that repeat an earlier prompt and add a little: its KV is where it was served.
    again: float = 0.1

    @property
    def mean_prompt_tokens(self) -> float:
        return (self.prompt_tokens[0] + self.prompt_tokens[-1]) / 2

    def describe(self) -> str:
        lengths, answers = self.prompt_tokens, self.output_tokens
        return (
            f"prompts of {lengths[0]:,} to {lengths[-1]:,} tokens, answers of {answers[0]} to {answers[-1]} tokens, streamed;"
            f" {self.again:.0%} of the requests repeat an earlier prompt with {TAIL_TOKENS} more tokens"
        )

    def shots(self, chance: random.Random) -> Iterator[Shot]:
        """Without end, all due at once."""
        earlier: deque[Tokens] = deque(maxlen=AGAIN_WITHIN)
        while True:
            old = len(earlier) - AGAIN_AFTER
            if old > 0 and chance.random() < self.again:
                prompt = earlier[chance.randrange(old)] + random_tokens(chance, TAIL_TOKENS)
            else:
                prompt = random_tokens(chance, chance.choice(self.prompt_tokens))
                earlier.append(prompt)
            yield shot(prompt, chance.choice(self.output_tokens))

    def schedule(self, due_s: Sequence[float], chance: random.Random) -> list[Shot]:
        return [
            Shot(due, shot.body, shot.prompt_tokens, shot.output_tokens) for due, shot in zip(due_s, self.shots(chance))
        ]


def shot(prompt: Tokens, output_tokens: int, due_s: float = 0.0) -> Shot:
    return Shot(due_s, completion(prompt, output_tokens, ()).body, len(prompt), output_tokens)
