"""Counts and times the server's requests, under vLLM's metric names, so that vLLM's dashboards work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from parallelformers_ng.serving.logs import current

_SECONDS = (0.001, 0.005, *(0.01 * 2**power for power in range(15)))
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_RATE_SECONDS = 10.0
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from the call to the first token.",
    "inter_token_latency_seconds": "Seconds from one token of an answer to the next token.",
    "e2e_request_latency_seconds": "Seconds from the call to the last token.",
    "request_prompt_tokens": "Number of tokens in a prompt.",
    "request_generation_tokens": "Number of tokens in an answer.",
    "request_max_num_generation_tokens": "Number of tokens in an answer.",
    "request_queue_time_seconds": "Seconds from the call to a free row.",
    "request_prefill_time_seconds": "Seconds from a free row to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the last token.",
    "request_time_per_output_token_seconds": "Decoding seconds per token after the first token.",
}
"""Names of histograms, without `vllm:`, and their descriptions; buckets are seconds, or numbers of tokens."""
_COUNTERS = {
    "vllm:prompt_tokens": ("Number of prompt tokens.",),
    "vllm:generation_tokens": ("Number of answer tokens.",),
    "vllm:request_success": ("Number of complete answers by finish reason.", "finished_reason"),
    "parallelformers:requests_refused": ("Number of refused requests by HTTP status.", "status"),
    "parallelformers:requests_failed": ("Number of failed requests by HTTP status.", "status"),
    "parallelformers:requests_cancelled": ("Number of requests whose client disconnected before the end.",),
}
"""Names of counters, their descriptions, and their labels after `model_name`."""
CLIENT_WENT = 499
"""HTTP status of a request whose client disconnected before the end; nginx uses the same number."""


@dataclass(eq=False)
class AnswerMetrics:
    """Token counts of one answer, and times of its events (`time.monotonic`); a time is 0 until the event."""

    prompt: int = 0  # number of prompt tokens; 0 until the model is called
    tokens: int = 0
    started: bool = False  # whether the model has been called for this answer
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0  # time at which the answer got a batch slot
    first: float = 0.0  # time of the first token
    latest: float = 0.0


class Metrics:
    """Prometheus metrics of one server.

    Args:
        name: name of the model, the label `model_name` of each metric.
        rows: maximum number of answers that are decoded together; other answers wait in order of arrival.
        cache_tokens: maximum number of tokens in the key/value caches of all rows.
    """

    def __init__(self, name: str, rows: int = 16, cache_tokens: int = 1 << 20) -> None:
        self.restarts: Callable[[], int] = lambda: 0  # number of worker restarts; `serve` sets the function
        self.last_token = 0.0  # time of the newest token of any answer, by `time.monotonic`
        self._name = name
        self._rows = rows
        self._answers: list[AnswerMetrics] = []  # in order of arrival: the first `rows` answers have the batch slots
        self._recent: deque[tuple[float, int]] = deque()
        self._registry = CollectorRegistry()

        def new(kind: Callable[..., Any], metric: str, text: str, *labels: str, **options: Any) -> Any:
            added = kind(metric, text, ("model_name", *labels), registry=self._registry, **options)
            return added if labels else added.labels(name)

        def cache_usage() -> float:
            return min(1.0, sum(each.prompt + each.tokens for each in self._answers[:rows]) / cache_tokens)

        cache_text = "Tokens of running prompts and answers, as a share of the cache capacity, 0 to 1."
        for metric, text, value in (
            ("vllm:num_requests_running", "Number of answers that have at least one token.", lambda: self.running),
            ("vllm:num_requests_waiting", "Number of answers that have no token yet.", lambda: self.waiting),
            ("vllm:kv_cache_usage_perc", cache_text, cache_usage),
            ("parallelformers:worker_restarts", "Number of worker restarts.", lambda: self.restarts()),
        ):
            new(Gauge, metric, text).set_function(value)
        self._counters = {metric: new(Counter, metric, *texts) for metric, texts in _COUNTERS.items()}
        self._histograms = {
            name: new(Histogram, f"vllm:{name}", text, buckets=_SECONDS if name.endswith("_seconds") else _TOKENS)
            for name, text in _HISTOGRAMS.items()
        }

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    @property
    def running(self) -> int:
        return sum(answer.tokens > 0 for answer in self._answers)

    @property
    def waiting(self) -> int:
        return self.in_flight - self.running

    @property
    def rate(self) -> float:
        """Generated tokens per second of all answers, averaged over the last 10 seconds."""
        since = time.monotonic() - _RATE_SECONDS
        return sum(tokens for when, tokens in self._recent if when >= since) / _RATE_SECONDS

    def arrive(self) -> AnswerMetrics:
        answer = AnswerMetrics()
        self._answers.append(answer)
        self._admit()
        return answer

    def leave(self, answer: AnswerMetrics) -> None:
        """Remove an answer from the running and waiting answers; add its times to the histograms if it has a token."""
        self._answers.remove(answer)
        self._admit()
        if not answer.tokens:
            return
        admitted, decoding = answer.admitted or answer.first, answer.latest - answer.first
        figures = {
            "e2e_request_latency_seconds": time.monotonic() - answer.arrived,
            "request_prompt_tokens": answer.prompt,
            "request_generation_tokens": answer.tokens,
            "request_max_num_generation_tokens": answer.tokens,
            "request_queue_time_seconds": admitted - answer.arrived,
            "request_prefill_time_seconds": max(0.0, answer.first - admitted),
            "request_decode_time_seconds": decoding,
        }
        if answer.tokens > 1:
            figures["request_time_per_output_token_seconds"] = decoding / (answer.tokens - 1)
        for name, figure in figures.items():
            self._histograms[name].observe(figure)

    def took(self, prompt_tokens: int) -> None:
        """Count prompt tokens, in the metrics and in the log record of the current request."""
        self._counters["vllm:prompt_tokens"].inc(prompt_tokens)
        current.get().prompt_tokens += prompt_tokens

    def wrote(self, answer: AnswerMetrics, tokens: int) -> None:
        """Count the new tokens of one decode step of an answer, and measure the times between tokens."""
        now = time.monotonic()
        if answer.tokens:
            for _ in range(tokens):
                self._histograms["inter_token_latency_seconds"].observe((now - answer.latest) / tokens)
        else:
            answer.first = now
            self._histograms["time_to_first_token_seconds"].observe(now - answer.arrived)
        record = current.get()
        record.tokens += tokens
        record.first = record.first or now
        answer.tokens += tokens
        answer.latest = self.last_token = now
        self._counters["vllm:generation_tokens"].inc(tokens)
        self._recent.append((now, tokens))
        while now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()

    def ended(self, reason: str) -> None:
        self._counters["vllm:request_success"].labels(self._name, reason).inc()

    def served(self, status: int) -> None:
        """Count a request by its HTTP status if it was refused, failed or canceled."""
        if status == CLIENT_WENT:
            self._counters["parallelformers:requests_cancelled"].inc()
        elif status >= 400:
            kind = "failed" if status >= 500 and status != 503 else "refused"
            self._counters[f"parallelformers:requests_{kind}"].labels(self._name, str(status)).inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _admit(self) -> None:
        for answer in self._answers[: self._rows]:
            answer.admitted = answer.admitted or time.monotonic()
