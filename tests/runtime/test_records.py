"""Tests that log records of ranks reach the caller's logging, and what ranks log in detail."""

from __future__ import annotations

import logging
import time

import pytest

from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.runtime import records
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import PROMPTLY
from tests.runtime.test_runtime_group import TARGET

OURS = "parallelformers_ng"


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, OURS)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return sorted(record for record in caplog.record_tuples if record[0].startswith(f"{OURS}.rank"))


def test_records_of_ranks_have_the_names_of_ranks(caplog):
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        group.call("write_log", OURS, logging.INFO, "of %d")
        group.call("write_log", OURS, logging.WARNING, "the same %.0s")
        group.call("write_log", OURS, logging.WARNING, "the same %.0s")
        group.call("write_log", OURS, logging.DEBUG, "a detail of %d")
    assert said(caplog) == [
        (f"{OURS}.rank0", logging.INFO, "of 0"),
        (f"{OURS}.rank0", logging.WARNING, "the same "),
        (f"{OURS}.rank0", logging.WARNING, "the same "),
        (f"{OURS}.rank1", logging.INFO, "of 1"),
    ] or {name for name, _, text in said(caplog) if text == "the same "} == {f"{OURS}.rank1"}


def test_callers_level_counts_at_each_record(caplog):
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        logging.getLogger(f"{OURS}.rank1").setLevel(logging.ERROR)
        try:
            group.call("write_log", OURS, logging.WARNING, "of %d")
            group.close()
        finally:
            logging.getLogger(f"{OURS}.rank1").setLevel(logging.NOTSET)
    assert said(caplog) == [(f"{OURS}.rank0", logging.WARNING, "of 0")]


def test_other_loggers_write_on_rank_0_alone(caplog, capfd):
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        group.call("write_log", "of.the.program", logging.WARNING, "of %d")
    assert not said(caplog)
    assert capfd.readouterr().err == "of 0\n"


def test_slow_handler_does_not_delay_calls():
    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.5)

    logger = logging.getLogger(f"{OURS}.rank0")
    logger.addHandler(handler := Slow())
    try:
        with WorkerGroup(1, target=TARGET, threads=1) as group:
            group.call("echo")
            begin = time.monotonic()
            group.call("write_log", OURS, logging.WARNING, "of %d")
            assert time.monotonic() - begin < 0.4
    finally:
        logger.removeHandler(handler)


def test_details_arrive_before_a_rank_hangs(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, OURS)
    monkeypatch.setenv(records.SWITCH, "1")
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        group.call("meet")
        with pytest.raises(RequestTimeoutError):
            group.call("late_to_meet", 1, deadline=time.monotonic() + PROMPTLY / 4)
        lines = {name: [text for each, _, text in said(caplog) if each == name] for name, _, _ in said(caplog)}
    waits, late = (lines[f"{OURS}.rank{rank}"] for rank in (0, 1))
    assert {"begin: request 1, meet()", "begin: sum of float32[1]", "begin: request 2, late_to_meet(1)"} <= {
        *waits,
        *late,
    }
    assert waits.count("begin: sum of float32[1]") == late.count("begin: sum of float32[1]") + 1 == 2
    assert sum(text.startswith("end: request 1, meet(), after ") for text in waits + late) == 2
    assert not any(text.startswith("end: request 2") for text in waits + late)


def test_nothing_is_logged_without_the_variable(caplog):
    caplog.set_level(logging.DEBUG, OURS)
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        group.call("meet")
    assert not said(caplog)
