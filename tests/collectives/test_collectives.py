"""Compares every collective, on real processes, with torch."""

from __future__ import annotations

import os
import time

import pytest
import torch

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator
from parallelformers_ng.errors import CollectiveAbortedError
from parallelformers_ng.sharding.layers import parallel_class
from parallelformers_ng.sharding.linear import GatheredColumnParallel, RowParallel
from tests.helpers.patience import PROMPTLY
from tests.helpers.rank_group import (
    FLOATS,
    OTHERS,
    SLOT_BYTES,
    RankGroup,
    bytes_of,
    connect_gloo,
    expected_sum,
    meet,
    reset_gloo,
    values,
)


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
            tensor = values(communicator.rank, count, dtype)
            result = communicator.all_reduce(tensor)
            expected = expected_sum(communicator.world_size, count, dtype)
            assert result is tensor, "a contiguous tensor is summed in place"
            assert torch.equal(bytes_of(result), bytes_of(expected)), f"{dtype}, {count} elements"


def test_sum_in_rank_order_equals_torch_bitwise(ranks: RankGroup) -> None:
    ranks.run(_check_sums)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_rounds_as_in_torch(two_ranks: RankGroup, dtype: torch.dtype) -> None:
    two_ranks.run(_sum_patterns, dtype)


def _check_awkward_tensors(communicator: Communicator) -> None:
    world_size, rank = communicator.world_size, communicator.rank
    base = torch.arange(600.0).view(20, 30) + rank
    total = (torch.arange(600.0).view(20, 30) * world_size) + sum(range(world_size))
    kept = base.clone()
    for view, expected in ((base.t(), total.t()), (base[:, ::2], total[:, ::2]), (base[0].expand(4, 30), total[:1])):
        result = communicator.all_reduce(view)
        assert torch.equal(result, expected.expand_as(result))
        assert result.is_contiguous()
        assert torch.equal(base, kept), "a tensor that is not contiguous stays unchanged"
    parameter = torch.nn.Parameter(base.clone())
    for tensor in (parameter, parameter * 1):
        result = communicator.all_reduce(tensor)
        assert torch.equal(result, total)
        assert not result.requires_grad
        assert torch.equal(tensor, kept), "a tensor that needs a gradient stays unchanged"
    with torch.inference_mode():
        assert torch.equal(communicator.all_reduce(base * 1), total)
    assert torch.equal(communicator.all_reduce(base[5:9]), total[5:9]), "a contiguous view is summed in place"
    assert torch.equal(base[5:9], total[5:9])
    assert torch.equal(base[:5], kept[:5])
    assert torch.equal(
        communicator.all_reduce(torch.tensor(rank + 1.0)), torch.tensor(sum(range(1, world_size + 1)) * 1.0)
    )


def test_strides_gradients_and_views(ranks: RankGroup) -> None:
    ranks.run(_check_awkward_tensors)


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
                    parts.append(values(peer, torch.Size(shape).numel(), dtype).view(shape))
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


def test_gathers_along_any_dimension_and_uneven(ranks: RankGroup) -> None:
    ranks.run(_check_gathers)


def _check_broadcasts(communicator: Communicator) -> None:
    for src in range(communicator.world_size):
        for count in (0, 1, SLOT_BYTES, 3 * SLOT_BYTES + 5):
            for dtype in (torch.uint8, torch.float16):
                tensor = values(communicator.rank, count, dtype, seed=src)
                assert communicator.broadcast(tensor, src) is tensor
                assert torch.equal(tensor, values(src, count, dtype, seed=src))
        base = torch.full((6, 4), float(communicator.rank))
        communicator.broadcast(base[:, 1], src)
        assert base[:, 1].eq(src).all()
        assert base[:, 2].eq(communicator.rank).all()
        meet(communicator)
    with pytest.raises(ValueError, match="src"):
        communicator.broadcast(torch.zeros(1), communicator.world_size)


def test_broadcast_from_every_rank(ranks: RankGroup) -> None:
    ranks.run(_check_broadcasts)


class _Block(torch.nn.Module):
    """A block that is sharded over the ranks, and a head whose outputs are gathered."""

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
    block, x = _Block(communicator), torch.randn(2, 6, generator=torch.Generator().manual_seed(9))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), block(x))


def test_compiled_layers_hold_their_collectives_in_one_graph(two_ranks: RankGroup) -> None:
    two_ranks.run(_check_compiled)


def _check_gloo(communicator: SharedMemoryCommunicator, rendezvous: str, arena: str) -> None:
    rank, world_size = communicator.rank, communicator.world_size
    environment = dict(os.environ)
    gloo = connect_gloo(communicator, rendezvous, arena)
    for dtype in (*FLOATS, torch.bool, torch.int16):
        result = gloo.all_reduce(values(rank, 1001, dtype))
        assert torch.equal(bytes_of(result), bytes_of(expected_sum(world_size, 1001, dtype)))
    sizes = [3 * r for r in range(world_size)]
    parts = [values(r, 2 * size, torch.float16).view(2, size) for r, size in enumerate(sizes)]
    assert torch.equal(gloo.all_gather(parts[rank], -1, sizes), torch.cat(parts, -1))
    tensor = values(rank, 12, torch.float32).view(3, 4).t()
    assert torch.equal(gloo.broadcast(tensor, 1), values(1, 12, torch.float32).view(3, 4).t())
    meet(gloo)
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.1)
        gloo.abort("given up")
    with pytest.raises(CollectiveAbortedError, match="given up"):
        gloo.all_reduce(torch.ones(3))
    assert time.monotonic() - start < PROMPTLY
    assert dict(os.environ) == environment
    reset_gloo(communicator, gloo)
    assert gloo.all_reduce(torch.ones(3)).eq(world_size).all()
    gloo.close()


def test_gloo_agrees_with_shared_memory_to_the_bit(two_ranks: RankGroup) -> None:
    two_ranks.run_with_gloo(_check_gloo)
