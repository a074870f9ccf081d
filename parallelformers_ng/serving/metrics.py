"""Counts and times the server's requests, under vLLM's metric names, so that vLLM's dashboards work."""

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
"""HTTP status of a request whose client disconnected before the end; nginx uses the same number."""


class Metrics:
    """Metrics of one server.

    Args:
        name: name of the model, used as the label `model_name` of each metric.
        rows: maximum number of answers that are decoded together; other answers wait in order of arrival.
        cache_tokens: maximum number of tokens in the key/value caches of all rows.

    Attributes:
        running: number of answers that have at least one token.
        waiting: number of answers that have no token yet.
        restarts: function that returns the number of worker restarts; the caller may replace the function.
        last_token: time of the newest token in seconds, on the clock of `time.monotonic`; 0 before the first token.
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

        def gauge(metric: str, text: str) -> Gauge:
            return Gauge(f"vllm:{metric}", text, ("model_name",), registry=self._registry).labels(name)

        def counter(metric: str, text: str) -> Counter:
            return Counter(f"vllm:{metric}", text, ("model_name",), registry=self._registry).labels(name)

        def histogram(metric: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{metric}", text, ("model_name",), registry=self._registry, buckets=buckets).labels(
                name
            )

        gauge("num_requests_running", "Number of answers that have at least one token.").set_function(
            lambda: self.running
        )
        gauge("num_requests_waiting", "Number of answers that have no token yet.").set_function(lambda: self.waiting)
        self._prompt = counter("prompt_tokens", "Number of prompt tokens.")
        self._generated = counter("generation_tokens", "Number of answer tokens.")
        self._first = histogram("time_to_first_token_seconds", "Seconds from the call to the first token.")
        self._between = histogram(
            "inter_token_latency_seconds", "Seconds from one token of an answer to the next token."
        )
        self._whole = histogram("e2e_request_latency_seconds", "Seconds from the call to the last token.")
        gauge(
            "kv_cache_usage_perc", "Tokens of running prompts and answers, as a share of the cache capacity, 0 to 1."
        ).set_function(lambda: min(1.0, sum(answer.cached for answer in self._active) / cache_tokens))
        self._prompt_length = histogram("request_prompt_tokens", "Number of tokens in a prompt.", _TOKENS)
        self._length = histogram("request_generation_tokens", "Number of tokens in an answer.", _TOKENS)
        self._longest = histogram("request_max_num_generation_tokens", "Number of tokens in an answer.", _TOKENS)
        self._queued = histogram("request_queue_time_seconds", "Seconds from the call to a free row.")
        self._prefill = histogram("request_prefill_time_seconds", "Seconds from a free row to the first token.")
        self._decode = histogram("request_decode_time_seconds", "Seconds from the first token to the last token.")
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Decoding seconds per token after the first token."
        )

        def own(metric: str, text: str, *labels: str) -> Counter:
            return Counter(f"parallelformers:{metric}", text, ("model_name", *labels), registry=self._registry)

        self._refused = own("requests_refused", "Number of refused requests by HTTP status.", "status")
        self._errors = own("requests_failed", "Number of failed requests by HTTP status.", "status")
        self._cancelled = own(
            "requests_cancelled", "Number of requests whose client disconnected before the end."
        ).labels(name)
        Gauge(
            "parallelformers:worker_restarts", "Number of worker restarts.", ("model_name",),
            registry=self._registry,
        ).labels(name).set_function(lambda: self.restarts())  # fmt: skip
        labels = ("model_name", "finished_reason")
        self._ended = Counter(
            "vllm:request_success", "Number of complete answers by finish reason.", labels, registry=self._registry
        )
        self._name = name

    @property
    def in_flight(self) -> int:
        """Number of running and waiting answers."""
        return self.running + self.waiting

    @property
    def rate(self) -> float:
        """Tokens per second, averaged over the last 10 seconds."""
        self._forget(time.monotonic())
        return sum(tokens for _, tokens in self._recent) / _RATE_SECONDS

    @contextmanager
    def answering(self, prompt: int = 0) -> Iterator[AnswerMetrics]:
        """Count one answer from its arrival until the block ends.

        Args:
            prompt: number of tokens in the prompt.
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
                self._whole.observe(time.monotonic() - answer.arrived)
            else:
                self.waiting -= 1

    def took(self, prompt_tokens: int) -> None:
        """Add tokens to the counter of prompt tokens and to the record of the current request."""
        self._prompt.inc(prompt_tokens)
        current.get().prompt_tokens += prompt_tokens

    def served(self, status: int) -> None:
        """Count a request if it was refused, failed or canceled.

        Args:
            status: HTTP status; 499 if the client disconnected before the end. Status 503 and the other statuses from
                400 to 499 count as refused, the other statuses from 500 as failed.
        """
        if status == CLIENT_WENT:
            self._cancelled.inc()
        elif status >= 500 and status != 503:
            self._errors.labels(self._name, str(status)).inc()
        elif status >= 400:
            self._refused.labels(self._name, str(status)).inc()

    def _admit(self) -> None:
        """Move waiting answers to free rows, in order of arrival."""
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
        self._queued.observe(admitted - answer.arrived)
        self._prefill.observe(max(0.0, answer.first - admitted))
        self._decode.observe(answer.latest - answer.first)
        if answer.tokens > 1:
            self._per_token.observe((answer.latest - answer.first) / (answer.tokens - 1))

    def ended(self, reason: str) -> None:
        """Count a complete answer.

        Args:
            reason: finish reason, "stop" or "length".
        """
        self._ended.labels(self._name, reason).inc()

    def page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
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
            self._first.observe(now - answer.arrived)
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
    """Times and token counts of one answer.

    Args:
        metrics: metrics of the server.
        prompt: number of tokens in the prompt.

    Attributes:
        prompt: the argument of the same name.
        tokens: number of tokens in the answer up to now.
        arrived, admitted, first, latest: times of the arrival, of the free row, and of the first and the newest token,
            in seconds on the clock of `time.monotonic`. `admitted` and `first` are 0 until then; `latest` begins as
            `arrived`.
        begun: whether the answer has at least one token.
    """

    def __init__(self, metrics: Metrics, prompt: int) -> None:
        self._metrics = metrics
        self.prompt = prompt
        self.tokens = 0
        self.admitted = self.first = 0.0
        self.arrived = self.latest = time.monotonic()
        self.begun = False

    @property
    def cached(self) -> int:
        """Number of tokens in the key/value cache of the answer's row."""
        return self.prompt + self.tokens

    def has(self, tokens: int) -> None:
        """Count new tokens of the answer, and record the current time as the time of the tokens.

        Args:
            tokens: number of new tokens; 0 changes nothing.
        """
        if tokens:
            self._metrics._note(self, tokens)
