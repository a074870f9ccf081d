"""Tests sums in memory that devices share, on pretended CUDA devices: see `tests/pretend_cuda/symmetric.py`."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from parallelformers_ng.collectives import small_sums
from parallelformers_ng.collectives.small_sums import SmallSums
from parallelformers_ng.errors import CollectiveAbortedError
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda import symmetric
from tests.pretend_cuda.caller import TARGET

READ = "sums of less than 256 KiB read the memory of the other devices"
STAY = "sums of less than 256 KiB stay with NCCL: "


def expected(count: int, dtype: str, offset: int = 0, ranks: int = 2) -> torch.Tensor:
    parts = [(torch.arange(count + offset) % 7 + 0.25 * rank).to(getattr(torch, dtype)) for rank in range(ranks)]
    return torch.stack(parts).sum(0, dtype=torch.float64).to(parts[0].dtype)[offset:]


def summed(group: WorkerGroup, *how: Any) -> list[int]:
    """Return the number of one-shot sums of each rank, after a comparison of the sums."""
    each = group.call_each("summed", [how])
    assert all(torch.equal(total, expected(*how[:3], ranks=group.world_size)) for total, _ in each)
    return [computed for _, computed in each]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [8, 8 * 999, 65528])
def test_kernel_sums_small_tensors(dtype: str, count: int, pretended: WorkerGroup) -> None:
    assert summed(pretended, count, dtype) == [1, 1]


def test_three_ranks_sum(pretended_groups: Any) -> None:
    assert summed(pretended_groups(3), 4096, "bfloat16") == [1, 1, 1]


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(7, "float32"), (3, "bfloat16"), (64, "float16"), (64, "float64"), (64, "int64"), (65536, "float32")],
)
def test_nccl_sums_other_sizes_and_types(count: int, dtype: str, pretended: WorkerGroup) -> None:
    assert summed(pretended, count, dtype) == [0, 0]


@pytest.mark.parametrize(("dtype", "offset"), [("bfloat16", 1), ("bfloat16", 3), ("float32", 1), ("float32", 4)])
def test_unaligned_tensor_is_summed(dtype: str, offset: int, pretended: WorkerGroup) -> None:
    """Ranks may differ in alignment, so alignment does not decide between kernel and NCCL."""
    assert summed(pretended, 64, dtype, offset) == [1, 1]


def test_sum_in_a_recording(pretended: WorkerGroup) -> None:
    assert summed(pretended, 4096, "bfloat16", 0, 3) == [3, 3]


def test_rank_0_logs_one_line(pretended: WorkerGroup) -> None:
    lines, buffers = zip(*pretended.call_each("small_sums", [()]), strict=True)
    assert set(lines[0]) == {READ}
    assert (lines[1], buffers) == ([], (1, 1))


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [
        ("far", "cuda:0 cannot read the memory of cuda:1"),
        ("wrong", "a sum differs from NCCL's"),
        pytest.param("raise", "RuntimeError: ", marks=pytest.mark.slow),
        ("hang", "a sum did not end within 2 s"),
    ],
)
def test_nccl_stays_after_a_failed_trial(mishap: str, reason: str, pretended: WorkerGroup, monkeypatch: Any) -> None:
    """All ranks decide the same, also if a trial fails on one rank. A reset does not repeat the trial."""
    monkeypatch.setenv(symmetric.MISHAP, mishap)
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        for _ in range(2):
            (lines, _), (others, _) = group.call_each("small_sums", [()])
            assert len(lines) == 1
            assert lines[0].startswith(STAY + reason)
            assert not others
            assert summed(group, 64, "bfloat16") == [0, 0]
            with pytest.raises(ValueError, match="for once"):
                group.call("fail_once", "for once")


def test_variable_of_nccl_forbids_peer_access(pretended: WorkerGroup, monkeypatch: Any) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        assert group.call("small_sums") == ([f"{STAY}NCCL_P2P_DISABLE=1 forbids copies between devices"], 0)


def test_abort_ends_a_waiting_kernel(pretended: WorkerGroup) -> None:
    """Rank 0 waits for signals of rank 1, which raises. The reset frees the shared memory and makes it anew."""
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        for _ in range(2):
            begun = time.monotonic()
            with pytest.raises(ValueError, match="not today"):
                group.call("sum_with_an_absent_rank")
            assert summed(group, 4096, "bfloat16", 0, 2) == [2, 2]
            assert time.monotonic() - begun < 20
            assert [buffers for _, buffers in group.call_each("small_sums", [()])] == [1, 1]


def test_trial_that_is_aborted_is_repeated(pretended: WorkerGroup) -> None:
    """A caller may give up a request while the ranks begin it with a reset."""
    with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
        with pytest.raises(ValueError, match="for once"):
            group.call("abort_next_trial")
        with pytest.raises(CollectiveAbortedError, match="a caller gave up"):
            summed(group, 64, "bfloat16")
        assert summed(group, 64, "bfloat16") == [1, 1]
        assert [buffers for _, buffers in group.call_each("small_sums", [()])] == [1, 1]


def test_long_path_of_torchs_socket_keeps_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies the path into a buffer of 108 bytes, without a check."""
    monkeypatch.setenv("TMPDIR", "/t" * 50)
    assert "too long for a socket" in small_sums._obstacle(torch.device("cuda", 0), [0, 1])


def test_choice_depends_on_type_and_size_only() -> None:
    assert SmallSums.can_sum(torch.ones(9, dtype=torch.bfloat16)[1:])
    assert not SmallSums.can_sum(torch.ones(0))
    assert not SmallSums.can_sum(torch.ones(9))
