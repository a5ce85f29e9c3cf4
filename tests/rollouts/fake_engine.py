"""An engine without a model: replies come from a function, lanes and dispatches behave as the real ones do."""

import hashlib
import types
from collections import deque

import numpy as np

from marl_jax.models.tokenizer import END, build_micro_tokenizer

TOKENIZER = build_micro_tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)


class FakeEngine:
    """`reply(prompt text, request)` is what the model says: a text (an end of turn is added) or bare token ids."""

    def __init__(self, reply, lanes=4, steps=4, tokenizer=TOKENIZER):
        self.reply, self.lanes, self.steps, self.tokenizer = reply, lanes, steps, tokenizer
        self.queue, self.running, self.tickets = deque(), {}, 0
        self.batches = []  # keys of the requests that shared each dispatch
        self.requests = []

    @property
    def pending(self):
        return len(self.queue) + len(self.running)

    def abandon(self):
        self.queue.clear()
        self.running.clear()

    def submit(self, request):
        self.requests.append(request)
        self.queue.append((self.tickets, request))
        self.tickets += 1
        return self.tickets - 1

    def step(self):
        while self.queue and len(self.running) < self.lanes:
            ticket, request = self.queue.popleft()
            said = self.reply(self.tokenizer.decode(request.tokens), request)
            if isinstance(said, str):
                said = [*self.tokenizer.encode(said, add_special_tokens=False), END_ID]
            self.running[ticket] = [request, said[: request.max_new_tokens], 0]
        self.batches.append(tuple(sorted(request.key for request, *_ in self.running.values())))
        finished = []
        for ticket, lane in list(self.running.items()):
            lane[2] += self.steps
            request, tokens, spoken = lane
            if spoken >= len(tokens):
                del self.running[ticket]
                reason = "stop" if tokens and tokens[-1] in request.stop_tokens else "length"
                finished.append(
                    (
                        ticket,
                        types.SimpleNamespace(
                            tokens=tokens, logprobs=noise(request, len(tokens)), finish_reason=reason
                        ),
                    )
                )
        return finished


def noise(request, n):
    """Log-probs that are a function of the request's key alone."""
    seed = int.from_bytes(hashlib.sha256(repr(request.key).encode()).digest()[:8], "little")
    return (-np.random.default_rng(seed).random(n)).astype(np.float32)
