"""Tests log lines, request ids, metrics for vLLM's dashboard, and probes without a key."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.serving import logs
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.patience import RESTART_SECONDS
from tests.helpers.server import ScriptedModel, serving, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SECRET = "a secret prompt"
BODY = {"prompt": SECRET, "max_tokens": 5}
PANELS = {
    "E2E Request Latency": ["e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"],
    "Token Throughput": ["prompt_tokens_total", "generation_tokens_total"],
    "Inter Token Latency": ["inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum"],
    "Scheduler State": ["num_requests_running", "num_requests_waiting"],
    "Time To First Token Latency": ["time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"],
    "Cache Utilization": ["kv_cache_usage_perc"],
    "Request Prompt Length": ["request_prompt_tokens_bucket"],
    "Request Generation Length": ["request_generation_tokens_bucket"],
    "Finish Reason": ["request_success_total"],
    "Queue Time": ["request_queue_time_seconds_sum"],
    "Requests Prefill and Decode Time": ["request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"],
    "Max Generation Token in Sequence Group": ["request_max_num_generation_tokens_sum"],
}
"""Series of each panel of vLLM's `examples/observability/prometheus_grafana/grafana.json`, without `vllm:`."""


@contextmanager
def logged(log_format: str) -> Iterator[io.StringIO]:
    """Yield a buffer that receives the log lines of the block, in the server's format."""
    out, level = io.StringIO(), logs.log.level
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.formatter(log_format))
    logs.log.addHandler(handler)
    logs.log.setLevel(logging.INFO)
    try:
        yield out
    finally:
        logs.log.setLevel(level)
        logs.log.removeHandler(handler)


def values(client: httpx.Client, path: str = "/metrics") -> dict[str, float]:
    """Return the sum of the samples of each metric, by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get(path).text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_each_request_has_a_line_and_an_id():
    with (
        logged("text") as out,
        serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER) as running,
        running.client() as http,
    ):
        named = http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "abc-1"})
        drawn = [
            http.post("/v1/completions", json=BODY, headers={"X-Request-Id": bad}) for bad in ("", "a b", "x" * 200)
        ]
        missing = http.get("/nothing%0AForged line")
    assert named.headers["x-request-id"] == "abc-1"
    assert all(re.fullmatch("[0-9a-f]{24}", each.headers["x-request-id"]) for each in (*drawn, missing))
    written = out.getvalue().splitlines()
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(
        rf"{when} INFO \[abc-1\] POST '/v1/completions' 200: 15 prompt tokens, 5 answer tokens,"
        r" first token after [\d.]+ s, end after [\d.]+ s",
        written[0],
    )
    assert len(written) == 5
    assert re.search(r" 404: end after [\d.]+ s: 'no route has the path /nothingForged line'$", written[-1])
    assert SECRET not in out.getvalue()


def test_lines_may_be_json_and_left_out():
    with (
        logged("json") as out,
        serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER) as running,
        running.client() as http,
    ):
        http.post("/v1/completions", json=BODY | {"stream": True}, headers={"X-Request-Id": "abc-2"})
        http.post("/v1/completions", json={"prompt": SECRET, "n": 999})
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["request_id"], first["level"], first["status"]) == ("abc-2", "info", 200)
    assert (first["tokens"], first["prompt_tokens"], second["status"]) == (5, 15, 400)
    assert 0 < first["first_token_seconds"] <= first["seconds"]
    assert SECRET not in out.getvalue()
    with (
        logged("json") as out,
        serving(ScriptedModel(TOKENIZER), TOKENIZER, no_access_log=True) as running,
        running.client() as http,
    ):
        http.get("/health")
    assert out.getvalue() == ""


@pytest.mark.parametrize("option", [{"log_format": "xml"}, {"log_level": "loud"}])
def test_unknown_log_formats_and_levels_are_refused(option):
    with pytest.raises(ParallelError, match=f"{next(iter(option))} is "):
        ServeOptions(model="x", **option)


def test_panels_of_vllms_dashboard_have_figures():
    with serving(ScriptedModel(TOKENIZER, "It says so."), TOKENIZER, rows=2) as running, running.client() as http:
        for number in range(100):
            assert http.post("/v1/completions", json={**BODY, "max_tokens": 1 + number % 5}).status_code == 200
        series_sums = values(http)
    for panel, series in PANELS.items():
        for name in series:
            assert f"vllm:{name}" in series_sums, panel
    assert series_sums["vllm:request_prompt_tokens_count"] == series_sums["vllm:request_generation_tokens_count"] == 100
    assert series_sums["vllm:request_prompt_tokens_sum"] == series_sums["vllm:prompt_tokens_total"] == 1500
    assert series_sums["vllm:request_generation_tokens_sum"] == series_sums["vllm:generation_tokens_total"] == 300
    assert series_sums["vllm:request_time_per_output_token_seconds_count"] == 80
    parts = [series_sums[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")]
    assert sum(parts) <= series_sums["vllm:e2e_request_latency_seconds_sum"] + 1e-6


def test_waiting_call_counts_as_queued():
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER, rows=1, waiting=3, cache_tokens=100) as running, running.client() as http:
        threads = [
            threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": BODY}) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        running.until(lambda: len(model.calls) == 3)
        time.sleep(0.2)
        used = values(http)["vllm:kv_cache_usage_perc"]
        model.release(running)
        for thread in threads:
            thread.join()
        series_sums = values(http)
    assert used == 0.15, "one row with a prompt of 15 tokens"
    assert series_sums["vllm:request_queue_time_seconds_sum"] >= 0.4, "two calls waited"
    assert series_sums["vllm:kv_cache_usage_perc"] == 0


def test_refusals_and_cancellations_are_counted():
    model = ScriptedModel(TOKENIZER, "It says so.", holds=True)
    with serving(model, TOKENIZER) as running, running.client() as http:
        assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        assert http.get("/nothing").status_code == 404
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=BODY, timeout=0.3)
        running.until(lambda: model.cancelled)
        running.until(lambda: values(http)["parallelformers:requests_cancelled_total"] == 1)
        text = http.get("/metrics").text
    assert 'parallelformers:requests_refused_total{model_name="tiny",status="400"} 1.0' in text
    assert 'parallelformers:requests_refused_total{model_name="tiny",status="404"} 1.0' in text
    assert 'parallelformers:worker_restarts{model_name="tiny"} 0.0' in text


@pytest.mark.parametrize("opened", [False, True])
def test_open_probes_answer_while_the_server_drains(opened):
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, api_key="key", open_probes=opened) as running:
        http = running.client()
        assert http.get("/metrics").status_code == (200 if opened else 401)
        assert http.get("/v1/models").status_code == 401
        running.app.draining = True
        assert http.get("/metrics", headers={"Authorization": "Bearer key"}).status_code == (200 if opened else 503)
        assert http.get("/v1/models", headers={"Authorization": "Bearer key"}).status_code == 503
        running.app.draining = False


@pytest.mark.parametrize("cors", [[], ["https://example.org"]])
def test_page_of_another_origin_reads_the_refusal(cors):
    with serving(ScriptedModel(TOKENIZER), TOKENIZER, api_key="key", cors=cors) as running:
        refused = running.client().get("/v1/models", headers={"Origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers.get("access-control-allow-origin") == (cors[0] if cors else None)


def test_death_of_a_rank_is_logged_with_cause(caplog: Any):
    with parallelize(tiny_model(TOKENIZER), 2, workers={"device": "cpu", "max_restarts": 2}) as model:
        worker = deployment_of(model).replicas[0].group._processes.workers[1]
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        end = time.monotonic() + RESTART_SECONDS
        while not any("started again" in each.getMessage() for each in caplog.records):
            assert time.monotonic() < end
            time.sleep(0.05)
    said = next(each.getMessage() for each in caplog.records if "started again" in each.getMessage())
    assert re.search(r"rank 1\b.*(signal 9|SIGKILL).*; all workers were started again in [\d.]+ s", said), said
