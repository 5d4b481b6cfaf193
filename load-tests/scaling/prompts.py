"""CPU of a request against the tokens of its prompt: index off, on by text, and on with the model's tokenizer.

At 100 tokens a prompt is shorter than a block of text (512 bytes): by text, it is not looked up. The engines, the prompts
and the way of measuring are those of scenarios/prompt_cost.py: first turns, one after the other.
"""

import neighbours  # noqa: F401  before what it makes importable
import prompt_cost
from ground import Ground, say
from lines import Curve, Line, points_of
from neighbours import TOKENIZER

# Tokens of a prompt, and prompts that are measured.
SIZES = {100: 400, 1_000: 150, 10_000: 30, 100_000: 6}
SIZES_QUICK = {100: 50, 1_000: 20}
INDEX = {"index off": prompt_cost.off, "index by text": prompt_cost.by_text, "index with tokenizer": prompt_cost.exact}
REASON = "every byte and token is looked at a bounded number of times"
WARM_REQUESTS = 20
# Of these texts in the vocabulary of the simulated engine.
TOKENS_PER_WORD = 1.42


def measure(ground: Ground) -> Curve:
    sizes = ground.effort.pick(SIZES, SIZES_QUICK)
    rounds: dict[str, list[dict[float, float]]] = {name: [] for name in INDEX}
    engines = [prompt_cost.start_engine(), prompt_cost.start_engine()]
    try:
        for turn in range(ground.effort.rounds):
            for name, index in INDEX.items():
                router = prompt_cost.Router(ground.programs / "tidegate", index(engines, TOKENIZER), engines, ground.work)
                try:
                    rounds[name].append(costs(router, sizes))
                finally:
                    router.stop()
                shown = ", ".join(f"{tokens:,.0f} tokens {us:,.0f} us" for tokens, us in rounds[name][-1].items())
                say(f"prompts, round {turn + 1}, {name}: {shown}")
    finally:
        for engine in engines:
            engine.stopped.set()
            engine.shutdown()
            engine.server_close()
    lines = [Line(name, "us of CPU per request", points_of(rounds[name]), 1.0, REASON) for name in INDEX]
    return Curve("prompts", "Prompt length", "tokens of the prompt", tuple(lines))


def costs(router: prompt_cost.Router, sizes: dict[int, int]) -> dict[float, float]:
    """CPU in us of a request, by tokens."""
    for body in prompt_cost.conversations(1, WARM_REQUESTS)[0]:
        router.post(body)
    found = {}
    for tokens, count in sizes.items():
        first, _ = prompt_cost.conversations(round(tokens / TOKENS_PER_WORD), count)
        cpu_ms, _ = prompt_cost.measure(router, first, tokens * prompt_cost.PAUSE_S_PER_TOKEN)
        found[tokens] = cpu_ms * 1000
    return found
