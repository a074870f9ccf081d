"""The server's metrics, under vLLM's names, so that its dashboards show them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from parallelformers_ng.serving.logs import current

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
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_RATE_SECONDS = 10.0
CLIENT_WENT = 499
"""Status of a request whose client went before the end, as nginx writes it."""


class Metrics:
    """Figures of one server.

    Args:
        name: name of the model, a label of each.
        rows: answers that are decoded at a time; others wait in the order in which they came.
        cache_tokens: tokens that the caches of all rows may have.

    Attributes:
        running, waiting: answers that have a token, and those that wait for their first.
        restarts: returns how often workers were started again.
        last_token: when one came, on the clock of `time.monotonic`.
    """

    def __init__(self, name: str, rows: int = 16, cache_tokens: int = 1 << 20) -> None:
        self.running, self.waiting = 0, 0
        self._rows = rows
        self._active: set[AnswerMetrics] = set()
        self._queue: deque[AnswerMetrics] = deque()
        self.restarts: Callable[[], int] = lambda: 0
        self.last_token = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._registry = CollectorRegistry()

        def gauge(what: str, text: str) -> Gauge:
            return Gauge(f"vllm:{what}", text, ("model_name",), registry=self._registry).labels(name)

        def counter(what: str, text: str) -> Counter:
            return Counter(f"vllm:{what}", text, ("model_name",), registry=self._registry).labels(name)

        def histogram(what: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{what}", text, ("model_name",), registry=self._registry, buckets=buckets).labels(
                name
            )

        gauge("num_requests_running", "Answers that are being written.").set_function(lambda: self.running)
        gauge("num_requests_waiting", "Answers that wait for their first token.").set_function(lambda: self.waiting)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._first = histogram("time_to_first_token_seconds", "From a call to its first token.")
        self._between = histogram("inter_token_latency_seconds", "From one token of an answer to its next.")
        self._whole = histogram("e2e_request_latency_seconds", "From a call to its last token.")
        gauge(
            "kv_cache_usage_perc", "Tokens of answers and their prompts, of those that the caches may have."
        ).set_function(lambda: min(1.0, sum(answer.cached for answer in self._active) / cache_tokens))
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._length = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._longest = histogram("request_max_num_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._queued = histogram("request_queue_time_seconds", "From a call to a free row.")
        self._prefill = histogram("request_prefill_time_seconds", "From a free row to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Time of decoding by tokens after the first."
        )

        def own(what: str, text: str, *labels: str) -> Counter:
            return Counter(f"parallelformers:{what}", text, ("model_name", *labels), registry=self._registry)

        self._refused = own("requests_refused", "Requests that were refused, by status.", "status")
        self._errors = own("requests_failed", "Requests that failed, by status.", "status")
        self._cancelled = own("requests_cancelled", "Requests whose client went before the end.").labels(name)
        Gauge(
            "parallelformers:worker_restarts", "How often workers were started again.", ("model_name",),
            registry=self._registry,
        ).labels(name).set_function(lambda: self.restarts())  # fmt: skip
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
    def answering(self, prompt: int = 0) -> Iterator[AnswerMetrics]:
        """Count one answer, while it waits and while it is written.

        Args:
            prompt: tokens of its prompt.
        """
        answer = AnswerMetrics(self, prompt)
        self.waiting += 1
        self._queue.append(answer)
        self._admit()
        try:
            yield answer
        finally:
            self._leave(answer)
            if answer.begun:
                self.running -= 1
                self._whole.observe(time.monotonic() - answer.asked)
            else:
                self.waiting -= 1

    def took(self, prompt_tokens: int) -> None:
        """A prompt was read."""
        self._prompt.inc(prompt_tokens)
        current.get().prompt_tokens += prompt_tokens

    def served(self, status: int) -> None:
        """Count a request that was not answered with success.

        Args:
            status: HTTP status; 499 if the client went before the end.
        """
        if status == CLIENT_WENT:
            self._cancelled.inc()
        elif status >= 500 and status != 503:
            self._errors.labels(self._name, str(status)).inc()
        elif status >= 400:
            self._refused.labels(self._name, str(status)).inc()

    def _admit(self) -> None:
        """Answers begin as rows are free: the batch serves them in order."""
        while self._queue and len(self._active) < self._rows:
            answer = self._queue.popleft()
            answer.admitted = time.monotonic()
            self._active.add(answer)

    def _leave(self, answer: AnswerMetrics) -> None:
        self._active.discard(answer)
        if answer in self._queue:
            self._queue.remove(answer)
        self._admit()
        if not answer.begun:
            return
        self._prompt_length.observe(answer.prompt)
        self._length.observe(answer.tokens)
        self._longest.observe(answer.tokens)
        admitted = answer.admitted or answer.first
        self._queued.observe(admitted - answer.asked)
        self._prefill.observe(max(0.0, answer.first - admitted))
        self._decode.observe(answer.latest - answer.first)
        if answer.tokens > 1:
            self._per_token.observe((answer.latest - answer.first) / (answer.tokens - 1))

    def ended(self, reason: str) -> None:
        """An answer is complete."""
        self._ended.labels(self._name, reason).inc()

    def page(self) -> bytes:
        """Return all of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _note(self, answer: AnswerMetrics, tokens: int) -> None:
        now = time.monotonic()
        if answer.begun:
            for _ in range(tokens):
                self._between.observe((now - answer.latest) / tokens)
        else:
            answer.begun = True
            self.waiting -= 1
            self.running += 1
            answer.first = now
            self._first.observe(now - answer.asked)
        record = current.get()
        record.tokens += tokens
        record.first = record.first or now
        answer.tokens += tokens
        answer.latest = self.last_token = now
        self._generated.inc(tokens)
        self._recent.append((now, tokens))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()


class AnswerMetrics:
    """One answer that is being counted.

    Args:
        metrics: metrics that count it.
        prompt: tokens of its prompt.
    """

    def __init__(self, metrics: Metrics, prompt: int) -> None:
        self._metrics = metrics
        self.prompt = prompt
        self.tokens = 0
        self.admitted = self.first = 0.0
        self.asked = self.latest = time.monotonic()
        self.begun = False

    @property
    def cached(self) -> int:
        """Tokens that its row has in the cache."""
        return self.prompt + self.tokens

    def has(self, tokens: int) -> None:
        """So many more tokens came."""
        if tokens:
            self._metrics._note(self, tokens)
