"""Devices and links, by their makers' data sheets, dense figures; and what of these a program gets to see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from parallelformers_ng.errors import ParallelError, did_you_mean


@dataclass(frozen=True)
class Link:
    """A link that carries bytes between devices.

    Attributes:
        bandwidth: bytes per second that a device sends, while it receives as many.
        hop_seconds: until a small message has come to the next device.
        start_seconds: least seconds of a sum or a gather.
        reference: source of the figures.
    """

    bandwidth: float
    hop_seconds: float
    start_seconds: float
    reference: str


@dataclass(frozen=True)
class Device:
    """A device that computes.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second that it reads from its memory.
        flops: data type → operations per second of dense matrix products.
        link: name of the link to the other devices of its host.
        reference: source of the figures.
        operator_seconds: least seconds of an operator, besides its bytes and its arithmetic.
        host_seconds: between two operators that the host starts one by one.
        read_share, flops_share: fraction of the data sheet's figures that large products
            reach.
        step_seconds: seconds of a step besides the model's operators: the choice of a token and the loop.
        layer_seconds: seconds of a decoder layer in one call, besides its bytes and its arithmetic; None
            without such a call.
        layer_bandwidth: bytes a second that such a layer reads, see `bandwidth`.
    """

    memory: float
    bandwidth: float
    flops: dict[torch.dtype, float]
    link: str
    reference: str
    operator_seconds: float = 3e-6
    host_seconds: float = 13e-6
    read_share: float = 0.8
    flops_share: float = 0.6
    step_seconds: float = 50e-6
    layer_seconds: float | None = None
    layer_bandwidth: float = math.inf

    @property
    def usable(self) -> float:
        """Bytes for a model: the rest is the driver's, NCCL's and the allocator's."""
        return self.memory * _USABLE


_USABLE = 0.9
"""vLLM's default for the same purpose (`gpu_memory_utilization`)."""


def _matrix(tera: float, fp32: float, fp8: bool = True) -> dict[torch.dtype, float]:
    """Dense operations of tensor cores in bf16 and fp16 → those of the other types; fp32 runs outside of them."""
    speeds = {torch.bfloat16: tera, torch.float16: tera, torch.float32: fp32}
    speeds |= {torch.float8_e4m3fn: 2 * tera} if fp8 else {}
    return {dtype: each * 1e12 for dtype, each in speeds.items()}


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_NCCL = "latencies: tree, LL, of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"

LINKS = {
    "nvlink2": Link(150e9, 0.6e-6, 6.8e-6, f"{_NVIDIA}v100/: 300 GB/s both ways; {_NCCL}"),
    "nvlink3": Link(300e9, 0.6e-6, 6.8e-6, f"{_NVIDIA}a100/: 600 GB/s both ways; {_NCCL}"),
    "nvlink4": Link(450e9, 0.6e-6, 6.8e-6, f"{_NVIDIA}h100/: 900 GB/s both ways; {_NCCL}"),
    "nvlink5": Link(900e9, 0.6e-6, 6.8e-6, f"{_NVIDIA}hgx/: 1.8 TB/s both ways; {_NCCL}"),
    "xgmi3": Link(448e9, 1.0e-6, 6.8e-6, f"{_MI300X}: 7 links of 128 GB/s both ways; {_NCCL}, as PCI"),
    "pcie4": Link(32e9, 1.0e-6, 6.8e-6, f"PCI Express 4.0, 16 lanes, 64 GB/s both ways; {_NCCL}"),
    "pcie4-host": Link(
        *(16e9, 2.0e-6, 6.8e-6),
        "by way of the host's memory, as GeForce cards have no peer-to-peer copies: AMD_BW of"
        f" https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h; {_NCCL}, two hops of PCI",
    ),
    "pcie5": Link(64e9, 1.0e-6, 6.8e-6, f"PCI Express 5.0, 16 lanes, 128 GB/s both ways; {_NCCL}"),
    "infiniband-hdr": Link(25e9, 5.0e-6, 6.8e-6, f"InfiniBand HDR, 200 Gb/s a device; {_NCCL}"),
    "infiniband-ndr": Link(50e9, 5.0e-6, 6.8e-6, f"InfiniBand NDR, 400 Gb/s a device; {_NCCL}"),
    "ethernet-100g": Link(12.5e9, 15e-6, 6.8e-6, "100GBASE; latency of TCP between hosts of a rack, about 15 µs"),
    "ethernet-25g": Link(3.1e9, 15e-6, 6.8e-6, "25GBASE; latency as above"),
    "ethernet-10g": Link(1.25e9, 25e-6, 6.8e-6, "10GBASE; latency of TCP between hosts of a rack, about 25 µs"),
}
"""Between devices of a host, and between hosts, counted for each device."""

DEVICES = {
    "v100": Device(32e9, 900e9, {torch.float16: 125e12, torch.float32: 15.7e12}, "nvlink2", f"{_NVIDIA}v100/"),
    "a100-40gb": Device(40e9, 1555e9, _matrix(312, 19.5, fp8=False), "nvlink3", f"{_NVIDIA}a100/"),
    "a100": Device(80e9, 2039e9, _matrix(312, 19.5, fp8=False), "nvlink3", f"{_NVIDIA}a100/"),
    "h100-pcie": Device(80e9, 2000e9, _matrix(756, 51), "pcie5", _HOPPER),
    "h100": Device(80e9, 3350e9, _matrix(989, 67), "nvlink4", f"{_NVIDIA}h100/"),
    "h200": Device(141e9, 4800e9, _matrix(989, 67), "nvlink4", f"{_NVIDIA}h200/"),
    "b200": Device(180e9, 8000e9, _matrix(2250, 80), "nvlink5", f"{_NVIDIA}hgx/"),
    "l4": Device(24e9, 300e9, _matrix(121, 30.3), "pcie4", f"{_NVIDIA}l4/"),
    "l40s": Device(48e9, 864e9, _matrix(362, 91.6), "pcie4", f"{_NVIDIA}l40s/"),
    "rtx4090": Device(24e9, 1008e9, _matrix(165, 82.6), "pcie4-host", _ADA),
    "mi300x": Device(192e9, 5300e9, _matrix(1307, 163.4), "xgmi3", _MI300X),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Hosts that are alike.

    Attributes:
        device: kind of the `devices` of each host.
        hosts: how many.
        link: between the devices of a host.
        network: between hosts.
    """

    device: Device
    hosts: int
    devices: int
    link: Link
    network: Link

    def exchange_seconds(self, ranks: int, bytes_: float, gathers: bool) -> float:
        """Return the seconds of a sum, or a gather, of a tensor among adjacent ranks: within each host, then across.

        Trees within hosts and across, up and down (NCCL's own model). Of `n` bytes a ring sends 2 n (k - 1) / k in a
        sum and n (k - 1) / k in a gather.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, self.devices)
        far = math.ceil(ranks / self.devices)
        ways = 1 if gathers else 2
        start = self.link.start_seconds if near > 1 else self.network.start_seconds
        latency = start + ways * ((near - 1) * self.link.hop_seconds + math.log2(far) * self.network.hop_seconds)
        carried = ways * bytes_ * ((near - 1) / near / self.link.bandwidth + (far - 1) / far / self.network.bandwidth)
        return latency + carried


T = TypeVar("T")


def named(table: dict[str, T], name: str, argument: str, *others: str) -> T:
    """Return an entry of a table.

    Args:
        others: further values that the argument takes.

    Raises:
        ParallelError: there is none of that name.
    """
    if name not in table:
        known = (*table, *others)
        hint = did_you_mean(name, known) or f"; it takes {', '.join(known)}"
        raise ParallelError(f"{argument} is {name!r}, which is none that is known{hint}")
    return table[name]
