"""What the server counts, under the names that vLLM gave them, so that its dashboards show them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
    163.84,
)
_RATE_SECONDS = 10.0


class Metrics:
    """Figures of one server.

    Args:
        name: of the model, a label of each.

    Attributes:
        running, waiting: answers that have a token, and those that wait for their first.
        last_token: when one came, on the clock of `time.monotonic`.
    """

    def __init__(self, name: str) -> None:
        self.running, self.waiting = 0, 0
        self.last_token = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._registry = CollectorRegistry()

        def gauge(what: str, text: str) -> Gauge:
            return Gauge(f"vllm:{what}", text, ("model_name",), registry=self._registry).labels(name)

        def counter(what: str, text: str) -> Counter:
            return Counter(f"vllm:{what}", text, ("model_name",), registry=self._registry).labels(name)

        def histogram(what: str, text: str) -> Histogram:
            return Histogram(f"vllm:{what}", text, ("model_name",), registry=self._registry, buckets=_SECONDS).labels(
                name
            )

        gauge("num_requests_running", "Answers that are being written.").set_function(lambda: self.running)
        gauge("num_requests_waiting", "Answers that wait for their first token.").set_function(lambda: self.waiting)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._first = histogram("time_to_first_token_seconds", "From a call to its first token.")
        self._between = histogram("inter_token_latency_seconds", "From one token of an answer to its next.")
        self._whole = histogram("e2e_request_latency_seconds", "From a call to its last token.")
        labels = ("model_name", "finished_reason")
        self._ended = Counter("vllm:request_success", "Answers that ended, by how.", labels, registry=self._registry)
        self._name = name

    @property
    def in_flight(self) -> int:
        return self.running + self.waiting

    @property
    def rate(self) -> float:
        """Tokens per second of the last seconds."""
        self._forget(time.monotonic())
        return sum(tokens for _, tokens in self._recent) / _RATE_SECONDS

    @contextmanager
    def answering(self) -> Iterator[Answer]:
        """Counts one answer, while it waits and while it is written."""
        answer = Answer(self)
        self.waiting += 1
        try:
            yield answer
        finally:
            if answer.begun:
                self.running -= 1
                self._whole.observe(time.monotonic() - answer.asked)
            else:
                self.waiting -= 1

    def took(self, prompt_tokens: int) -> None:
        """A prompt was read."""
        self._prompt.inc(prompt_tokens)

    def ended(self, reason: str) -> None:
        """An answer is complete."""
        self._ended.labels(self._name, reason).inc()

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _note(self, answer: Answer, tokens: int) -> None:
        now = time.monotonic()
        if answer.begun:
            for _ in range(tokens):
                self._between.observe((now - answer.latest) / tokens)
        else:
            answer.begun = True
            self.waiting -= 1
            self.running += 1
            self._first.observe(now - answer.asked)
        answer.latest = self.last_token = now
        self._generated.inc(tokens)
        self._recent.append((now, tokens))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()


class Answer:
    """One answer that is being counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.asked = self.latest = time.monotonic()
        self.begun = False

    def has(self, tokens: int) -> None:
        """So many more tokens came."""
        if tokens:
            self._metrics._note(self, tokens)
