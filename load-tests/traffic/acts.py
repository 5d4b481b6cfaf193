"""What the clients of the traffic generator do: each act is one client's visit, chosen by its weight."""

import random
from dataclasses import dataclass, field
from itertools import count
from typing import Callable, Iterator

from wire import Router, Taken

# Chats that go on at one time, and how long each is before a new one takes its place.
CONVERSATIONS = 12
MAX_TURNS = 6
# Questions that are asked again and again at temperature 0, so that the response cache knows the answers.
FAQ = 16
# Prompts above 512 tokens go through a prefill worker first, shorter ones straight to a decode worker. A word is two or
# three tokens of the simulated engines.
SHORT_WORDS = 40
LONG_WORDS = 700
ANSWER_TOKENS = (16, 64)
LONG_ANSWER_TOKENS = 400
# A client that leaves has read this much: the head of the stream and a few events.
LEAVES_AFTER_BYTES = 600
# As config/compose.yaml names them: a key whose requests wait for each other, one that asks for more than it may, and a
# model that another stands in for. A router that does not know them serves the keys as any client, and the model not at all.
BATCH_KEY, GREEDY_KEY = "tidegate-batch-key", "tidegate-greedy-key"
BATCH_AT_ONCE = 4
RESERVED_MODEL = "meta-llama/Llama-3.1-405B-Instruct"
VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"


def prose(chance: random.Random, words: int) -> str:
    syllables = lambda: "".join(chance.choice(CONSONANTS) + chance.choice(VOWELS) for _ in range(chance.randint(1, 3)))
    return " ".join(syllables() for _ in range(words))


@dataclass
class Conversation:
    """A chat of several turns. Its system prompt is one of a few, so that its beginning is in caches already."""

    messages: list[dict]
    turns: int = 0


@dataclass
class Visit:
    """The request of one client, or of several at the same moment."""

    name: str
    requests: list[Callable[[Router], Taken]]


@dataclass
class Cast:
    """Makes visits. Used by one thread alone, so that a seed gives the same visits again."""

    model: str
    chance: random.Random
    serial: Iterator[int] = field(default_factory=count)

    def __post_init__(self):
        self.systems = [prose(self.chance, words) for words in (SHORT_WORDS, SHORT_WORDS, LONG_WORDS, LONG_WORDS)]
        self.faq = [prose(self.chance, words) for words in [SHORT_WORDS, LONG_WORDS] * (FAQ // 2)]
        self.conversations = [self.new_conversation() for _ in range(CONVERSATIONS)]
        self.acts: list[tuple[int, Callable[[], Visit]]] = [
            (40, self.chat_turn),
            (20, self.known_question),
            (6, self.same_question_at_once),
            (8, self.long_prompt),
            (6, self.two_choices),
            (5, self.completion),
            (4, self.embedding),
            (3, self.tokenize),
            (3, self.private),
            (6, self.leaver),
            (4, self.batch),
            (8, self.greedy),
            (4, self.reserved_model),
            (2, self.unknown_model),
            (2, self.bad_body),
        ]

    def next_visit(self) -> Visit:
        weights = [weight for weight, _ in self.acts]
        return self.chance.choices([act for _, act in self.acts], weights)[0]()

    def new_conversation(self) -> Conversation:
        return Conversation([{"role": "system", "content": self.chance.choice(self.systems)}])

    def chat(self, messages: list[dict], **more) -> dict:
        tokens = self.chance.randint(*ANSWER_TOKENS)
        return {"model": self.model, "messages": messages, "max_tokens": tokens, "stream": self.chance.random() < 0.6, **more}

    def question(self, words: int) -> list[dict]:
        return [{"role": "user", "content": f"{next(self.serial)} {prose(self.chance, words)}"}]

    def chat_turn(self) -> Visit:
        """The next turn of a chat, with all that was said before."""
        at = self.chance.randrange(CONVERSATIONS)
        if self.conversations[at].turns >= MAX_TURNS:
            self.conversations[at] = self.new_conversation()
        conversation = self.conversations[at]
        conversation.turns += 1
        conversation.messages.append({"role": "user", "content": prose(self.chance, SHORT_WORDS)})
        body = self.chat(list(conversation.messages), temperature=0.7)

        def ask(router: Router) -> Taken:
            taken = router.post("/v1/chat/completions", body, {})
            if taken.text:
                # A turn that comes before this answer does without it, as with a client that did not wait.
                conversation.messages.append({"role": "assistant", "content": taken.text})
            return taken

        return Visit("chat turn", [ask])

    def known_question(self) -> Visit:
        question = self.chance.choice(self.faq)
        messages, stream = [{"role": "user", "content": question}], self.chance.random() < 0.5
        body = {"model": self.model, "messages": messages, "max_tokens": 32, "temperature": 0, "stream": stream}
        return self.one("known question", "/v1/chat/completions", body)

    def same_question_at_once(self) -> Visit:
        """Three clients with one new question: two of them join the first one's answer."""
        body = self.chat(self.question(SHORT_WORDS), temperature=0)
        return Visit("same question at once", [posting("/v1/chat/completions", body)] * 3)

    def long_prompt(self) -> Visit:
        return self.one("long prompt", "/v1/chat/completions", self.chat(self.question(LONG_WORDS), temperature=0.7))

    def two_choices(self) -> Visit:
        """Cannot be split."""
        return self.one("two choices", "/v1/chat/completions", self.chat(self.question(SHORT_WORDS), n=2))

    def completion(self) -> Visit:
        body = {"model": self.model, "prompt": prose(self.chance, SHORT_WORDS), "max_tokens": 32, "temperature": 0}
        return self.one("completion", "/v1/completions", body)

    def embedding(self) -> Visit:
        return self.one("embedding", "/v1/embeddings", {"model": self.model, "input": prose(self.chance, SHORT_WORDS)})

    def tokenize(self) -> Visit:
        return self.one("tokenize", "/tokenize", {"model": self.model, "prompt": prose(self.chance, SHORT_WORDS)})

    def private(self) -> Visit:
        """Asks the cache to keep out of it."""
        body = self.chat(self.question(SHORT_WORDS), temperature=0, stream=False)
        return self.one("private", "/v1/chat/completions", body, {"cache-control": "no-store"})

    def leaver(self) -> Visit:
        body = self.chat(self.question(SHORT_WORDS), temperature=0.7, stream=True, max_tokens=LONG_ANSWER_TOKENS)
        ask = lambda router: router.post("/v1/chat/completions", body, {}, LEAVES_AFTER_BYTES)
        return Visit("leaver", [ask])

    def batch(self) -> Visit:
        """More at one time than its key may have: some wait."""
        body = self.chat(self.question(SHORT_WORDS), temperature=0.7)
        return Visit("batch", [posting("/v1/chat/completions", body, {"x-api-key": BATCH_KEY})] * BATCH_AT_ONCE)

    def greedy(self) -> Visit:
        """More in a minute than its key may have."""
        body = self.chat(self.question(SHORT_WORDS), temperature=0.7)
        return self.one("greedy", "/v1/chat/completions", body, {"x-api-key": GREEDY_KEY})

    def reserved_model(self) -> Visit:
        """Another model answers in its place."""
        body = self.chat(self.question(SHORT_WORDS)) | {"model": RESERVED_MODEL}
        return self.one("reserved model", "/v1/chat/completions", body)

    def unknown_model(self) -> Visit:
        body = self.chat(self.question(SHORT_WORDS)) | {"model": "no-such-model"}
        return self.one("unknown model", "/v1/chat/completions", body)

    def bad_body(self) -> Visit:
        return self.one("bad body", "/v1/chat/completions", b'{"model": ')

    def one(self, name: str, path: str, body: dict | bytes, headers: dict[str, str] | None = None) -> Visit:
        return Visit(name, [posting(path, body, headers)])


def posting(path: str, body: dict | bytes, headers: dict[str, str] | None = None) -> Callable[[Router], Taken]:
    return lambda router: router.post(path, body, headers or {})
