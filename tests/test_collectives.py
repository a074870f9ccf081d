"""Every collective, on real processes: against torch, between kernels, and when somebody fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng.collectives import (
    Arena,
    SingleCommunicator,
    connect,
    create_rendezvous,
    open_store,
    rendezvous_path,
)
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.collectives.communicator import Communicator, sum_in_rank_order
from parallelformers_ng.collectives.layout import ArenaMap
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator, available_kernels
from parallelformers_ng.collectives.traced import register
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError, GroupError, ProtocolError
from parallelformers_ng.sharding.layers import GatheredColumnParallel, RowParallel, parallel_class
from tests.patience import PROMPTLY

SLOT_BYTES, ONE_SHOT_BYTES = 4096, 1024
WORLD_SIZES = (1, 2, 3, 4, 5)
KERNELS = (*available_kernels(), "mixed")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64)


def _serve(rank: int, world_size: int, arena: DupFd, pipe: Any) -> None:
    """A rank: receive a function, call it with the communicator asked for, answer."""
    torch.set_num_threads(1)
    fd = arena.detach()

    def open_kernel(kernel: str, timeout: float = 20.0) -> SharedMemoryCommunicator:
        if kernel == "mixed":
            kernel = available_kernels()[rank % len(available_kernels())]
        return SharedMemoryCommunicator(fd, rank, world_size, timeout, kernel)  # type: ignore[arg-type]

    communicators = {kernel: open_kernel(kernel) for kernel in KERNELS}
    with contextlib.suppress(EOFError):
        while True:
            kernel, function, arguments = pipe.recv()
            communicator = communicators.get(kernel) or open_kernel(*kernel)
            try:
                pipe.send((function(communicator, *arguments), None))
            except Exception:
                pipe.send((None, traceback.format_exc()))


class RankGroup:
    """Ranks that live for the whole module, all kernels on one arena: its counters are the only state."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "parallelformers_ng.collectives"])
        self.world_size = world_size
        self.arena = Arena.create(world_size, SLOT_BYTES, ONE_SHOT_BYTES)
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, world_size, DupFd(self.arena.fd), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, kernel: Any, function: Callable, *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((kernel, function, arguments))

    def finish(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(60), f"rank {rank} hangs"
            answers.append(pipe.recv())
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [value for value, _ in answers]

    def run(self, kernel: Any, function: Callable, *arguments: Any) -> list[Any]:
        self.start(kernel, function, *arguments)
        return self.finish()

    def reset(self) -> None:
        self.arena.reset()
        self.run("mixed", _reset)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            assert process.exitcode == 0
        self.arena.close()


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=lambda size: f"ranks{size}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    group = RankGroup(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    group = RankGroup(2)
    yield group
    group.close()


def _reset(communicator: Communicator) -> None:
    communicator.reset()


def _values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        scale = torch.randint(-8, 8, (count,), generator=generator).exp2()
        return (torch.randn(count, generator=generator) * scale).to(dtype)
    return torch.randint(0, 120, (count,), generator=generator).to(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _expected_sum(world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = _values(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + _values(rank, count, dtype).to(wide)
    return total.to(dtype)


def _check_sums(communicator: Communicator) -> None:
    for dtype in FLOATS + OTHERS:
        in_slot = SLOT_BYTES // dtype.itemsize
        for count in (
            0,
            1,
            2,
            31,
            33,
            in_slot // 4,
            in_slot // 4 + 1,
            in_slot - 1,
            in_slot,
            in_slot + 1,
            3 * in_slot + 7,
        ):
            tensor = _values(communicator.rank, count, dtype)
            result = communicator.all_reduce(tensor)
            expected = _expected_sum(communicator.world_size, count, dtype)
            assert result is tensor, "a contiguous tensor is summed in place"
            assert torch.equal(_bytes(result), _bytes(expected)), f"{dtype}, {count} elements"


@pytest.mark.parametrize("kernel", KERNELS)
def test_sum_has_the_bits_of_torch_in_rank_order(group: RankGroup, kernel: str) -> None:
    group.run(kernel, _check_sums)


def _sum_patterns(communicator: Communicator, dtype: torch.dtype) -> torch.Tensor:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(communicator.rank))
    own = patterns if communicator.rank == 0 else patterns[order]
    result = communicator.all_reduce(own.clone().view(dtype))
    zeros = torch.full((2**16,), -0.0, dtype=dtype)
    kept = communicator.all_reduce(patterns.clone().view(dtype) if communicator.rank == 0 else zeros)
    whole = patterns.view(dtype)
    numbers = ~whole.isnan()
    assert torch.equal(kept.view(torch.int16)[numbers], patterns[numbers]), "x + -0 has the bits of x"
    assert torch.equal(kept.isnan(), ~numbers)
    permutations = [torch.randperm(2**16, generator=torch.Generator().manual_seed(r)) for r in range(1, 2)]
    expected = whole.float() + patterns[permutations[0]].view(dtype).float()
    numbers = ~expected.isnan()
    assert torch.equal(result.view(torch.int16)[numbers], expected.to(dtype).view(torch.int16)[numbers])
    assert torch.equal(result.isnan(), ~numbers)
    return result.view(torch.int16)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_rounds_as_in_torch(pair: RankGroup, kernel: str, dtype: torch.dtype) -> None:
    pair.run(kernel, _sum_patterns, dtype)


def _check_awkward_tensors(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    base = torch.arange(600.0).view(20, 30) + rank
    total = (torch.arange(600.0).view(20, 30) * world_size) + sum(range(world_size))
    kept = base.clone()
    for view, expected in ((base.t(), total.t()), (base[:, ::2], total[:, ::2]), (base[0].expand(4, 30), total[:1])):
        result = communicator.all_reduce(view)
        assert torch.equal(result, expected.expand_as(result))
        assert result.is_contiguous()
        assert torch.equal(base, kept), "a tensor that is not contiguous is left alone"
    parameter = torch.nn.Parameter(base.clone())
    for tensor in (parameter, parameter * 1):
        result = communicator.all_reduce(tensor)
        assert torch.equal(result, total)
        assert not result.requires_grad
        assert torch.equal(tensor, kept), "a tensor that needs a gradient is left alone"
    with torch.inference_mode():
        assert torch.equal(communicator.all_reduce(base * 1), total)
    assert torch.equal(communicator.all_reduce(base[5:9]), total[5:9]), "a contiguous view is summed in place"
    assert torch.equal(base[5:9], total[5:9])
    assert torch.equal(base[:5], kept[:5])
    assert torch.equal(
        communicator.all_reduce(torch.tensor(rank + 1.0)), torch.tensor(sum(range(1, world_size + 1)) * 1.0)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_gradients_and_views(group: RankGroup, kernel: str) -> None:
    group.run(kernel, _check_awkward_tensors)


def _check_gathers(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    cases = (
        [2] * world_size,
        [0] * world_size,
        [(3 * r) % 5 for r in range(world_size)],
        [0, 700, 3, 0, 9][:world_size],
    )
    for sizes in cases:
        for dim in (0, 1, 2, -1):
            for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
                parts = []
                for peer, size in enumerate(sizes):
                    shape = [3, 4, 5]
                    shape[dim] = size
                    parts.append(_values(peer, torch.Size(shape).numel(), dtype).view(shape))
                result = communicator.all_gather(parts[rank], dim, sizes)
                assert torch.equal(result, torch.cat(parts, dim))
                assert result.is_contiguous()
                if len(set(sizes)) == 1:
                    assert torch.equal(communicator.all_gather(parts[rank], dim), torch.cat(parts, dim))
    column = torch.arange(12.0).view(3, 4).t() + rank
    assert torch.equal(communicator.all_gather(column), torch.cat([column - rank + r for r in range(world_size)], -1))
    wanted = [1] * world_size
    for dim, sizes in (
        (2, wanted),
        (-3, wanted),
        (0, wanted[1:]),
        (0, [1] * rank + [2] + [1] * (world_size - rank - 1)),
    ):
        with pytest.raises(ValueError, match="all_gather"):
            communicator.all_gather(torch.zeros(1, 1), dim, sizes)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gathers_along_any_dimension_and_uneven(group: RankGroup, kernel: str) -> None:
    group.run(kernel, _check_gathers)


def _check_broadcasts(communicator: Communicator) -> None:
    for src in range(communicator.world_size):
        for count in (0, 1, SLOT_BYTES, 3 * SLOT_BYTES + 5):
            for dtype in (torch.uint8, torch.float16):
                tensor = _values(communicator.rank, count, dtype, seed=src)
                assert communicator.broadcast(tensor, src) is tensor
                assert torch.equal(tensor, _values(src, count, dtype, seed=src))
        base = torch.full((6, 4), float(communicator.rank))
        communicator.broadcast(base[:, 1], src)
        assert base[:, 1].eq(src).all()
        assert base[:, 2].eq(communicator.rank).all()
        communicator.barrier()
    with pytest.raises(ValueError, match="src"):
        communicator.broadcast(torch.zeros(1), communicator.world_size)


@pytest.mark.parametrize("kernel", KERNELS)
def test_broadcast_from_every_rank(group: RankGroup, kernel: str) -> None:
    group.run(kernel, _check_broadcasts)


class _Block(torch.nn.Module):
    """A block cut over the ranks, and a head whose outputs are put together."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(communicator.rank)
        self.down, self.head = torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 3)
        for parameter in self.parameters():
            parameter.detach().copy_(torch.randn(parameter.shape, generator=generator))
        for layer, kind in ((self.down, RowParallel), (self.head, GatheredColumnParallel)):
            layer.__class__ = parallel_class(kind, torch.nn.Linear)
            layer.communicator = communicator
        self.head.gathered_sizes = [3] * communicator.world_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.down(x)))


def _check_compiled(communicator: Communicator) -> None:
    register(communicator)
    block, x = _Block(communicator), torch.randn(2, 6, generator=torch.Generator().manual_seed(9))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), block(x))


def test_compiled_layers_hold_their_collectives_in_one_graph(pair: RankGroup) -> None:
    pair.run(KERNELS[0], _check_compiled)


def _barrier_order(communicator: Communicator) -> tuple[float, float]:
    time.sleep(0.05 * communicator.rank)
    arrived = time.monotonic()
    communicator.barrier()
    return arrived, time.monotonic()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nobody_leaves_a_barrier_before_all_have_come(group: RankGroup, kernel: str) -> None:
    times = group.run(kernel, _barrier_order)
    assert max(arrived for arrived, _ in times) <= min(left for _, left in times)


def _wait_for_abort(communicator: Communicator) -> tuple[float, str]:
    moment = 0.0
    if communicator.rank == 0:
        time.sleep(0.1)
        communicator.abort("out of luck")
        moment = time.monotonic()
    with pytest.raises(CollectiveAbortedError) as caught:
        communicator.all_reduce(torch.ones(5000))
    return moment or time.monotonic(), str(caught.value)


def _check_works(communicator: Communicator) -> None:
    result = communicator.all_reduce(torch.full((3000,), communicator.rank + 1.0))
    assert result.eq(sum(range(1, communicator.world_size + 1))).all()


def _late_rank(communicator: Communicator, late: int) -> tuple[float, str]:
    start = time.monotonic()
    if communicator.rank == late:
        time.sleep(1.0)
    with pytest.raises(CollectiveAbortedError) as caught:
        communicator.all_reduce(torch.ones(3))
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_abort_by_a_peer_reaches_all_at_once(group: RankGroup, kernel: str) -> None:
    answers = group.run(kernel, _wait_for_abort)
    assert all("rank 0: out of luck" in message for _, message in answers)
    assert max(moment for moment, _ in answers) - answers[0][0] < PROMPTLY
    group.reset()
    group.run(kernel, _check_works)


def _wait_without_rank_0(communicator: Communicator) -> tuple[float, str]:
    if communicator.rank == 0:
        return 0.0, "the parent: killed"
    with pytest.raises(CollectiveAbortedError) as caught:
        communicator.barrier()
    return time.monotonic(), str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_abort_by_the_parent_reaches_all_at_once(group: RankGroup, kernel: str) -> None:
    group.start(kernel, _wait_without_rank_0)
    time.sleep(0.1)
    moment = time.monotonic()
    group.arena.abort("killed")
    for left, message in group.finish():
        assert left - moment < PROMPTLY
        assert "the parent: killed" in message
    group.reset()
    group.run(kernel, _check_works)


@pytest.mark.parametrize("kernel", KERNELS)
def test_timeout_names_the_late_rank(pair: RankGroup, kernel: str) -> None:
    for waited, message in pair.run((kernel, 0.2), _late_rank, 1):
        assert 0.2 <= waited < PROMPTLY
        assert "ranks [1] did not come within 0.2 s" in message
    pair.reset()
    pair.run(kernel, _check_works)


def _diverge(communicator: Communicator) -> str:
    try:
        communicator.all_reduce(torch.ones(10 + communicator.rank))
    except (DivergedError, CollectiveAbortedError) as error:
        return type(error).__name__
    return "no error"


@pytest.mark.parametrize("kernel", KERNELS)
def test_ranks_in_different_collectives_are_found_out(pair: RankGroup, kernel: str) -> None:
    answers = pair.run(kernel, _diverge)
    assert "DivergedError" in answers
    assert set(answers) <= {"DivergedError", "CollectiveAbortedError"}
    pair.reset()
    pair.run(kernel, _check_works)


def _interrupted(communicator: Communicator) -> float:
    if communicator.rank:
        return 0.0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            communicator.barrier()
    finally:
        signal.signal(signal.SIGALRM, previous)
    return time.monotonic() - start


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_signal_handler_runs_in_a_long_wait(pair: RankGroup, kernel: str) -> None:
    assert pair.run(kernel, _interrupted)[0] < PROMPTLY
    pair.reset()
    pair.run(kernel, _check_works)


def _cancelled(communicator: Communicator) -> int:
    return communicator.cancel_sequence()


def test_cancel_word_reaches_every_rank(pair: RankGroup) -> None:
    pair.arena.request_cancel(2**63 + 17)
    assert pair.run("mixed", _cancelled) == [2**63 + 17] * 2
    pair.reset()
    assert pair.run("mixed", _cancelled) == [0] * 2


def _reset_too_early(communicator: Communicator) -> None:
    communicator.barrier()
    with pytest.raises(ProtocolError, match=r"Arena\.reset"):
        communicator.reset()


def test_reset_before_the_parent_is_refused(pair: RankGroup) -> None:
    pair.run("mixed", _reset_too_early)


# ---- one process is enough ----------------------------------------------------------------------------------------


def test_arena_refuses_more_than_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 2**20
    # Pretend that memory is short: really asking for too much would call the out-of-memory killer.
    monkeypatch.setattr("parallelformers_ng.collectives.arena.available_memory", lambda: 2**20)
    with pytest.raises(OSError, match="exceed the available memory of 1048576 bytes") as caught:
        Arena.create(2, slot_bytes=2**19)
    assert caught.value.errno == errno.ENOSPC


def test_arena_refuses_what_does_not_fit() -> None:
    for arguments in ((0,), (257,), (2, 0), (2, 100), (2, 64, -1)):
        with pytest.raises(ValueError, match="Arena"):
            Arena.create(*arguments)
    with Arena.create(2, SLOT_BYTES) as arena:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, 0)
        assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(ProtocolError, match="3 ranks"):
            ArenaMap(arena.fd, 3)


@pytest.mark.skipif("c" not in available_kernels(), reason="the C kernel is not built")
def test_c_kernel_validates_its_arguments() -> None:
    from parallelformers_ng.collectives._kernel import Kernel

    with Arena.create(2, SLOT_BYTES) as arena:
        memory = ArenaMap(arena.fd, 2).memory
        for bad in ((memory, 2, 2, 1.0), (memory, -1, 2, 1.0), (memory, 0, 3, 1.0), (memory, 0, 2, 0.0)):
            with pytest.raises(ValueError, match="do not fit"):
                Kernel(*bad)
        for buffer in (bytearray(100), bytearray(memory[:9000]), bytearray(20000)):
            with pytest.raises(ValueError, match="do not fit"):
                Kernel(buffer, 0, 2, 1.0)
        kernel = Kernel(memory, 0, 2, 1.0)
        for method, bad in (
            (kernel.all_reduce, (0, 1, 4)),
            (kernel.all_reduce, (0, 2**62, 0)),
            (kernel.all_reduce, (0, 1)),
            (kernel.all_gather, (0, 0, 1, 4, 1)),
            (kernel.all_gather, (0, 0, 2, 2**62, 1, 1)),
            (kernel.all_gather, (0, 0, 1, 1, -1, 1)),
            (kernel.broadcast, (0, 1, 2)),
        ):
            with pytest.raises((ValueError, TypeError, OverflowError)):
                method(*bad)
        kernel.close()
        with pytest.raises(ValueError, match="close"):
            kernel.barrier()


def test_wrong_device_and_wrong_backend_are_refused() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    common: dict[str, Any] = {"rank": 0, "world_size": 2, "rendezvous": None, "timeout": 1.0}
    with Arena.create(2, SLOT_BYTES) as arena:
        communicator = SharedMemoryCommunicator(arena.fd, 0, 2, 1.0)
        with pytest.raises(ValueError, match="meta"):
            communicator.all_reduce(torch.zeros(3, device="meta"))
        communicator.close()
        communicator.close()
        for backend, device, fd in (
            ("mpi", cpu, arena.fd),
            ("nccl", cpu, arena.fd),
            ("gloo", cuda, arena.fd),
            ("shared_memory", cpu, None),
            ("gloo", cpu, arena.fd),
        ):
            with pytest.raises(ValueError, match="connect"):
                connect(backend, device=device, arena_fd=fd, **common)


def test_one_rank_needs_nobody() -> None:
    with Arena.create(1, SLOT_BYTES) as arena:
        communicator = connect(
            "auto", rank=0, world_size=1, device=torch.device("cpu"), arena_fd=arena.fd, rendezvous=None, timeout=1.0
        )
        assert isinstance(communicator, SingleCommunicator)
        tensor = torch.randn(3, 4)
        assert communicator.all_reduce(tensor) is tensor
        assert torch.equal(communicator.all_gather(tensor.t(), 0, [4]), tensor.t())
        arena.request_cancel(5)
        assert communicator.cancel_sequence() == 5


def test_16_bit_sums_round_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert sum_in_rank_order(parts, out=torch.empty(1, dtype=torch.bfloat16)).item() == 258.0


# ---- gloo ---------------------------------------------------------------------------------------------------------


def _check_gloo(communicator: SharedMemoryCommunicator, rendezvous: str) -> None:
    rank, world_size = communicator.rank, communicator.world_size
    common: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": 20.0, "rendezvous": rendezvous}
    environment = dict(os.environ)
    gloo = connect("gloo", device=torch.device("cpu"), arena_fd=None, **common)
    gloo._arena = communicator._shared  # the arena that this rank has mapped already
    for dtype in (*FLOATS, torch.bool, torch.int16):
        result = gloo.all_reduce(_values(rank, 1001, dtype))
        assert torch.equal(_bytes(result), _bytes(_expected_sum(world_size, 1001, dtype)))
    sizes = [3 * r for r in range(world_size)]
    parts = [_values(r, 2 * size, torch.float16).view(2, size) for r, size in enumerate(sizes)]
    assert torch.equal(gloo.all_gather(parts[rank], -1, sizes), torch.cat(parts, -1))
    tensor = _values(rank, 12, torch.float32).view(3, 4).t()
    assert torch.equal(gloo.broadcast(tensor, 1), _values(1, 12, torch.float32).view(3, 4).t())
    gloo.barrier()
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.1)
        gloo.abort("given up")
    with pytest.raises(CollectiveAbortedError, match="given up"):
        gloo.all_reduce(torch.ones(3))
    assert time.monotonic() - start < PROMPTLY
    assert dict(os.environ) == environment
    gloo._arena = None  # as if the parent had reset it
    gloo.reset()
    assert gloo.all_reduce(torch.ones(3)).eq(world_size).all()
    gloo.close()


def test_gloo_agrees_with_shared_memory_to_the_bit(pair: RankGroup) -> None:
    rendezvous = create_rendezvous()
    try:
        pair.run("mixed", _check_gloo, rendezvous_path(rendezvous))
    finally:
        os.close(rendezvous)
        pair.reset()


def test_rendezvous_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(GroupError, match="0o700"):
        open_store(str(tmp_path / "store"), 2)
