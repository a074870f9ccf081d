"""Silent mistakes on a device, made on purpose: the stand-in has to find each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.pretend_cuda.stubs import CUDAGraph, Event, Stream, graph, record_stream


def _device(value: float = 1.0) -> torch.Tensor:
    return torch.full((8,), value, device="cuda:0")


def _captured(given: torch.Tensor) -> tuple[CUDAGraph, torch.Tensor]:
    made = CUDAGraph()
    with graph(made):
        output = given * 2
    return made, output


def use_without_waiting(right: bool) -> None:
    """A tensor of one stream is read on another."""
    side, given = Stream(), _device()
    torch.cuda.synchronize()
    with side:
        given.add_(1)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    given.sum()


def overwrite_without_waiting(right: bool) -> None:
    """A tensor that another stream reads is written."""
    side, given = Stream(), _device()
    side.wait_stream(torch.cuda.current_stream())
    with side:
        given.sum()
        read = Event()
        read.record()
    if right:
        read.wait()
    given.zero_()


def let_go_without_lending(right: bool) -> None:
    """Memory of one stream is taken again while another reads it."""
    side = Stream()
    with side:
        given = _device()
    torch.cuda.current_stream().wait_stream(side)
    given.sum()
    if right:
        record_stream(given, torch.cuda.current_stream())
    del given
    with side:
        _device()


def read_too_early(right: bool) -> None:
    """A copy to the host is read that nobody has waited for."""
    given = _device(3.0)
    copy = given.to("cpu", non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    assert copy.tolist() == [3.0] * 8, "the copy has not come"


def refill_too_early(right: bool) -> None:
    """Page-locked memory is written while a copy leaves it."""
    buffer, given = torch.empty(8, pin_memory=True), _device()
    given.copy_(buffer, non_blocking=True)
    if right:
        torch.cuda.synchronize()
    buffer.fill_(2)


def free_what_a_graph_needs(right: bool) -> None:
    """A graph reads memory that was freed."""
    given = _device()
    made, _ = _captured(given)
    if not right:
        del given
    made.replay()


def keep_the_output_of_another_graph(right: bool) -> None:
    """Graphs of one pool overwrite what each other left there."""
    given, pool = _device(), torch.cuda.graph_pool_handle()
    graphs = [CUDAGraph(), CUDAGraph()]
    outputs = []
    for made in graphs:
        with graph(made, pool=pool):
            outputs.append(given * 2)
    graphs[0].replay()
    kept = outputs[0].clone() if right else outputs[0]
    graphs[1].replay()
    assert kept.tolist() == [2.0] * 8, "another graph has overwritten it"


def capture_into_a_pool_without_graphs(right: bool) -> None:
    """Each graph of a pool was reset, and a tensor of it lives."""
    given, pool = _device(), torch.cuda.graph_pool_handle()
    first, second = CUDAGraph(), CUDAGraph()
    with graph(first, pool=pool):
        output = given * 2
    first.reset()
    if right:
        del output
    with graph(second, pool=pool):
        given * 2


def wait_in_a_capture(right: bool) -> None:
    """The host asks for a number of the device."""
    given = _device()
    with graph(CUDAGraph()):
        total = given.sum()
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
"""Each is done wrong, or right."""
