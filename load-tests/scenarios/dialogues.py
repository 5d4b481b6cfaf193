"""Conversations with a real engine, held once before anything is measured, so that their answers are known.

An engine's answer depends on the prompt and the engine's seed alone; all engines here have the same seed. So what is learnt
from one engine without load is what every engine will say, and a whole conversation can be written down in advance.
"""

import json
import random
import urllib.request
from functools import partial

from fleet import MODEL
from workloads import Request, Tokens, completion, random_tokens

# What chats are made of. The engines' tokenizer knows few words, so one word is some two or three tokens.
VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"


class Teller:
    """The engine that is asked beforehand."""

    def __init__(self, url: str):
        self.url = url

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": MODEL, **body}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


class TokenDialogue:
    """A conversation in token ids: the client keeps ids, as one that tokenises for itself."""

    def __init__(self, teller: Teller, chance: random.Random):
        self.teller = teller
        self.chance = chance
        self.tokens: Tokens = ()

    def ask(self, new_tokens: int, answer_tokens: int) -> tuple[Tokens, partial[Request]]:
        self.tokens += random_tokens(self.chance, new_tokens)
        return self.tokens, partial(completion, self.tokens, answer_tokens)

    def answer(self, answer_tokens: int) -> None:
        body = {"prompt": self.tokens, "max_tokens": answer_tokens, "ignore_eos": True}
        text = self.teller.post("/v1/completions", body)["choices"][0]["text"]
        self.tokens += tuple(self.teller.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])


class ChatDialogue:
    """A conversation in messages: the router has to ask an engine for the tokens."""

    def __init__(self, teller: Teller, chance: random.Random):
        self.teller = teller
        self.chance = chance
        self.messages: list[dict] = []

    def ask(self, new_tokens: int, answer_tokens: int) -> tuple[Tokens, partial[Request]]:
        self.messages.append({"role": "user", "content": self.words(new_tokens)})
        question = {"messages": self.messages, "add_generation_prompt": True}
        tokens = tuple(self.teller.post("/tokenize", question)["tokens"])
        return tokens, partial(self.request, list(self.messages), len(tokens), answer_tokens)

    def answer(self, answer_tokens: int) -> None:
        body = {"messages": self.messages, "max_tokens": answer_tokens, "ignore_eos": True}
        answer = self.teller.post("/v1/chat/completions", body)
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    def words(self, tokens: int) -> str:
        """Made-up words of about so many tokens."""
        syllables = [self.chance.choice(CONSONANTS) + self.chance.choice(VOWELS) for _ in range(tokens)]
        return " ".join("".join(syllables[i : i + 2]) for i in range(0, len(syllables), 2))

    @staticmethod
    def request(messages: list[dict], prompt_tokens: int, answer_tokens: int, **rest) -> Request:
        body = {
            "model": MODEL, "messages": messages, "max_tokens": answer_tokens, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        return Request("/v1/chat/completions", json.dumps(body).encode(), prompt_tokens, answer_tokens, **rest)
