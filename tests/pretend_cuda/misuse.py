"""Misuses devices on purpose, in ways that a real device hides: the stand-in must detect each misuse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.pretend_cuda.stubs import CUDAGraph, Event, Stream, graph, record_stream


def _device(value: float = 1.0) -> torch.Tensor:
    return torch.full((8,), value, device="cuda:0")


def _captured(tensor: torch.Tensor) -> tuple[CUDAGraph, torch.Tensor]:
    recorded = CUDAGraph()
    with graph(recorded):
        output = tensor * 2
    return recorded, output


def use_without_waiting(right: bool) -> None:
    """Read a tensor of one stream on another stream, without a wait unless `right`."""
    side, tensor = Stream(), _device()
    torch.cuda.synchronize()
    with side:
        tensor.add_(1)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    tensor.sum()


def overwrite_without_waiting(right: bool) -> None:
    """Write a tensor while another stream reads it, without a wait unless `right`."""
    side, tensor = Stream(), _device()
    side.wait_stream(torch.cuda.current_stream())
    with side:
        tensor.sum()
        read = Event()
        read.record()
    if right:
        read.wait()
    tensor.zero_()


def let_go_without_lending(right: bool) -> None:
    """Reuse memory of one stream while another reads it."""
    side = Stream()
    with side:
        tensor = _device()
    torch.cuda.current_stream().wait_stream(side)
    tensor.sum()
    if right:
        record_stream(tensor, torch.cuda.current_stream())
    del tensor
    with side:
        _device()


def read_too_early(right: bool) -> None:
    """Read a copy to the host, without a wait for the copy unless `right`."""
    tensor = _device(3.0)
    copy = tensor.to("cpu", non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    assert copy.tolist() == [3.0] * 8, "the copy has not arrived"


def refill_too_early(right: bool) -> None:
    """Write page-locked memory while a copy still reads it, without a wait unless `right`."""
    buffer, tensor = torch.empty(8, pin_memory=True), _device()
    tensor.copy_(buffer, non_blocking=True)
    if right:
        torch.cuda.synchronize()
    buffer.fill_(2)


def free_what_a_graph_needs(right: bool) -> None:
    """Replay a graph that reads freed memory."""
    tensor = _device()
    recorded, _ = _captured(tensor)
    if not right:
        del tensor
    recorded.replay()


def keep_the_output_of_another_graph(right: bool) -> None:
    """Use the output of a graph after another graph of the pool has overwritten it."""
    tensor, pool = _device(), torch.cuda.graph_pool_handle()
    graphs = [CUDAGraph(), CUDAGraph()]
    outputs = []
    for recorded in graphs:
        with graph(recorded, pool=pool):
            outputs.append(tensor * 2)
    graphs[0].replay()
    kept = outputs[0].clone() if right else outputs[0]
    graphs[1].replay()
    assert kept.tolist() == [2.0] * 8, "another graph has overwritten it"


def capture_into_a_pool_without_graphs(right: bool) -> None:
    """Capture into a pool whose graphs were all reset, while one of its tensors lives."""
    tensor, pool = _device(), torch.cuda.graph_pool_handle()
    first, second = CUDAGraph(), CUDAGraph()
    with graph(first, pool=pool):
        output = tensor * 2
    first.reset()
    if right:
        del output
    with graph(second, pool=pool):
        tensor * 2


def wait_in_a_capture(right: bool) -> None:
    """Read a number of the device during a capture."""
    tensor = _device()
    with graph(CUDAGraph()):
        total = tensor.sum()
        if not right:
            total.item()


MISUSES: dict[str, Callable[[bool], None]] = {
    "use": use_without_waiting,
    "overwrite": overwrite_without_waiting,
    "let go": let_go_without_lending,
    "read early": read_too_early,
    "refill early": refill_too_early,
    "free": free_what_a_graph_needs,
    "other graph": keep_the_output_of_another_graph,
    "pool": capture_into_a_pool_without_graphs,
    "wait": wait_in_a_capture,
}
"""Misuses by name; each function takes whether to do it right."""
