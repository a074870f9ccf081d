"""Tests the worker group in normal use, without dead workers."""

from __future__ import annotations

import gc
import operator
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from parallelformers_ng.errors import GroupClosedError, GroupError, NotPortableError, WorkerError
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.spawn import environment_of_worker
from parallelformers_ng.wire.frame import FileDescriptor
from tests.helpers.patience import PROMPTLY
from tests.helpers.runtime_target import Reading

TARGET = "tests.helpers.runtime_target:Target"
SCRIPT = """
from parallelformers_ng.runtime.group import WorkerGroup
class Local:
    def __init__(self, value): self.value = value
    def __call__(self, rank): return self.value + rank
with WorkerGroup(2, target="tests.helpers.runtime_target:Target", threads=1) as group:
    print("answer", group.call("sum_of_ranks", 1.0), group.call("call_it", Local(5)))
"""


@pytest.fixture(scope="module")
def group():
    with WorkerGroup(2, target=TARGET, threads=1) as group:
        yield group
        assert group.alive


def environment():
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(root)}


def test_call_runs_on_all_ranks_rank_zero_answers(group):
    assert group.call("echo", 1, b=[torch.float16]) == (1, {"b": [torch.float16]})
    assert group.call("sum_of_ranks", 2.0) == 5.0
    assert group.call("own", "x") == (0, "x")
    assert group.call_each("own", [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    with pytest.raises(ValueError, match="arguments for 3 ranks, but the group has 2"):
        group.call_each("own", [("a",)] * 3)
    assert group.call_each("own", [("a",)]) == [(0, "a"), (1, "a")]


def test_group_thread_avoids_cpu_of_spinning_rank():
    all_cpus = os.sched_getaffinity(0)
    if usable_cpus() < 2:
        pytest.skip("no rank spins")
    os.sched_setaffinity(0, sorted(all_cpus)[:2])  # one for each rank; rank 0 spins
    try:
        with WorkerGroup(2, target=TARGET, threads=1) as group:
            of_group = [each.native_id for each in threading.enumerate() if each.name == "parallelformers_ng-group"][-1]
            rank_0, rank_1 = map(os.sched_getaffinity, group.pids)
            assert os.sched_getaffinity(of_group) == rank_1 != rank_0
            assert os.sched_getaffinity(0) == rank_0 | rank_1
    finally:
        os.sched_setaffinity(0, all_cpus)


def test_large_tensors_and_dataclasses_make_the_round_trip(group):
    tensor = torch.randn(1 << 20)
    assert torch.equal(group.call("echo", tensor), tensor)
    assert group.call("zeros", 1 << 20).shape == (1 << 20,)
    assert torch.equal(group.call("echo", Reading("r", tensor)).values, tensor)


def test_changed_arguments_on_a_rank_disturb_nobody(group):
    tensor = torch.ones(1 << 16)
    sums = group.call_each("scale_in_place", [(tensor,), (tensor,)])
    assert sums == [2 << 16, 3 << 16]
    group.call("scale_in_place", tensor)
    assert tensor.sum() == 1 << 16


def test_received_results_do_not_use_up_descriptors(group):
    before = psutil.Process().num_fds()
    results = [group.call("zeros", 1 << 15) for _ in range(20)]
    assert psutil.Process().num_fds() <= before
    del results


def test_error_on_all_ranks_has_its_own_type(group):
    with pytest.raises(ValueError, match="a bad value") as caught:
        group.call("raise_value_error", [0, 1])
    assert isinstance(caught.value, WorkerError)
    assert caught.value.args == ("a bad value", 7)
    assert caught.value.rank == 0
    assert "raise_value_error" in caught.value.remote_traceback
    assert "Traceback of rank 0" in caught.value.__notes__[0]
    assert group.call("sum_of_ranks", 1.0) == 3.0


@pytest.mark.parametrize("rank", [0, 1])
def test_error_on_one_rank_frees_its_peers(group, rank):
    resets = group.call("reset_count")
    start = time.monotonic()
    with pytest.raises(ValueError, match="a bad value") as caught:
        group.call("raise_value_error", [rank])
    assert time.monotonic() - start < PROMPTLY
    assert caught.value.rank == rank
    for _ in range(3):
        assert group.call("sum_of_ranks", 1.0) == 3.0
    assert group.call_each("reset_count", [(), ()]) == [resets + 1] * 2


def test_unpicklable_exceptions_stay_readable(group):
    with pytest.raises(WorkerError, match="odd"):
        group.call("raise_odd")
    with pytest.raises(WorkerError, match="can't decode byte 0xff"):
        group.call("raise_unicode")
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        group.call("missing")
    with pytest.raises(TypeError, match="unexpected keyword"):
        group.call("sleep", second=1)
    with pytest.raises(GroupError, match="private"):
        group.call("_private")


def test_arguments_that_cannot_cross_are_named(group):
    with pytest.raises(NotPortableError, match=r"kwargs\['locks'\]\[1\]"):
        group.call("echo", locks=[1, threading.Lock()])
    with pytest.raises(NotPortableError, match=r"args\[0\]"):
        group.call("echo", threading.Lock())
    assert group.call("echo", 1) == 1


def test_results_that_cannot_cross_fail_one_request(group):
    with pytest.raises(NotPortableError, match="result"):
        group.call("call_it", lambda rank: threading.Lock())
    assert group.call("echo", 1) == 1


def test_functions_and_local_classes_cross_by_value(group):
    class Adder:
        def __init__(self, amount):
            self.amount = amount

        def __call__(self, rank):
            return self.amount + rank

    assert group.call("call_it", Adder(4)) == 4


def test_events_reach_the_caller_in_order(group):
    seen = []
    assert group.call("count", 20, on_event=seen.append) == 20
    assert seen == list(range(20))
    assert group.call("count", 3) == 3


def test_a_listener_that_raises_cancels_the_request(group):
    def refuse(number):
        if number == 5:
            raise KeyError("enough")

    start = time.monotonic()
    with pytest.raises(KeyError, match="enough"):
        group.call("count", 100_000, on_event=refuse)
    assert time.monotonic() - start < PROMPTLY
    assert group.call("sum_of_ranks", 1.0) == 3.0


def test_call_from_a_listener_is_refused(group):
    with pytest.raises(GroupError, match="on_event"):
        group.call("count", 3, on_event=lambda _: group.call("echo", 1))


def test_sixteen_threads_each_get_their_own_answers(group):
    wrong: list[object] = []

    def work(identity):
        for number in range(30):
            answer = group.call("echo", (identity, number))
            total = group.call("sum_of_ranks", float(number))
            if answer != (identity, number) or total != 2 * number + 1:
                wrong.append((identity, number, answer, total))

    threads = [threading.Thread(target=work, args=(identity,)) for identity in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_may_ask_at_once_for_readiness(group):
    answers = []

    def ask():
        answers.append(all(group.alive for _ in range(2000)))  # a thread with an error adds no answer

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8


def test_waiting_for_a_turn_ends_at_deadline(group):
    thread = threading.Thread(target=group.call, args=("sleep", 1.5))
    thread.start()
    time.sleep(0.5)
    with pytest.raises(TimeoutError, match="did not start within"):
        group.call("echo", 1, deadline=time.monotonic() + 0.1)
    thread.join()
    assert group.call("echo", 1) == 1


def test_open_files_go_to_every_rank(group):
    fd = os.memfd_create("test")
    os.write(fd, b"weights")
    assert group.call_each("read_and_close", [(FileDescriptor(fd),)] * 2) == [b"weights"] * 2
    os.close(fd)


def test_workers_have_equal_threads_and_users_environment(group):
    assert group.call_each("threads", [(), ()]) == [(1, "1"), (1, "1")]
    assert group.device_names == ["cpu:0", "cpu:1"]
    assert len(set(group.pids)) == 2


def test_ranks_prefer_flash_attention_unless_told(monkeypatch):
    name = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    assert environment_of_worker(1)[name] == "1"
    monkeypatch.setenv(name, "0")
    assert environment_of_worker(1)[name] == "0"


def test_groups_leave_nothing_behind():
    me = psutil.Process()
    WorkerGroup(2, target=TARGET, threads=1).close()  # opens everything that stays open
    shared = sorted(os.listdir("/dev/shm"))
    before = (me.num_fds(), threading.active_count(), len(me.children()))
    for _ in range(2):
        with WorkerGroup(2, target=TARGET, threads=1) as group:
            assert torch.equal(group.call("echo", torch.ones(1 << 20)), torch.ones(1 << 20))
            assert sorted(os.listdir("/dev/shm")) == shared
            pids = group.pids
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(GroupClosedError):
            group.call("echo", 1)
        group.close()
    dropped = WorkerGroup(2, target=TARGET, threads=1)
    pids = dropped.pids
    del dropped, group
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    after = (me.num_fds(), threading.active_count(), len(me.children()))
    assert all(map(operator.le, after, before)), (before, after)


def test_close_from_another_thread_ends_a_call():
    group = WorkerGroup(2, target=TARGET, threads=1)
    caught: list[BaseException] = []

    def work():
        try:
            group.call("spin")
        except GroupError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    group.close()
    thread.join(PROMPTLY)
    assert [type(error) for error in caught] == [GroupClosedError]


SLOWLY = [pytest.param(way, marks=pytest.mark.slow) for way in ("-c", "thread")]


@pytest.mark.parametrize("way", ["stdin", "shadowed", *SLOWLY])
def test_groups_start_from_anywhere_without_a_main_guard(way, tmp_path):
    script, arguments, text = SCRIPT, [], None
    if way == "thread":
        body = "".join(f"    {line}\n" for line in SCRIPT.splitlines())
        script = f"def run():\n{body}\nimport threading\nt = threading.Thread(target=run)\nt.start()\nt.join()\n"
    if way == "stdin":
        arguments, text = ["-"], script
    elif way == "-c":
        arguments = ["-c", script]
    else:
        (tmp_path / "script.py").write_text(script)
        arguments = [str(tmp_path / "script.py")]
    if way == "shadowed":  # in the current folder, but not in the folder of the script
        tmp_path = tmp_path / "folder"
        tmp_path.mkdir()
        (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')")
    result = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "answer 3.0 5\n", result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("keeps_group", [False, True])
def test_output_of_workers_reaches_the_user(keeps_group):
    """The output also reaches the user if the program still has the group at its end."""
    script = (
        "from parallelformers_ng.runtime.group import WorkerGroup\n"
        "group = WorkerGroup(2, target='tests.helpers.runtime_target:Target', threads=1)\n"
        "group.call('say', 'hello')\n"
    )
    script += "" if keeps_group else "del group\n"
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("hello\n", "hello\n")
