"""Devices and the links between those of one host, by their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from parallelformers_ng.errors import ParallelError, did_you_mean


@dataclass(frozen=True)
class Link:
    """A link that carries bytes between devices.

    Attributes:
        bandwidth: bytes per second that a device sends, while it receives as many.
        hop_seconds: until a small message has come to the next device.
        reference: source of the figures.
    """

    bandwidth: float
    hop_seconds: float
    reference: str

    def exchange_seconds(self, ranks: int, bytes_: float, gathers: bool) -> float:
        """Return the seconds of a sum, or a gather, of a tensor among devices of a host.

        A tree, up and down (NCCL's own model). Of `n` bytes a ring sends 2 n (k - 1) / k in a sum and n (k - 1) / k in
        a gather.
        """
        ways = 1 if gathers else 2
        return _START_SECONDS + ways * (ranks - 1) * (self.hop_seconds + bytes_ / ranks / self.bandwidth)


_START_SECONDS = 6.8e-6
"""Least seconds of a sum or a gather."""


@dataclass(frozen=True)
class Device:
    """A device that computes.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second that it reads from its memory.
        link: name of the link to the other devices of its host.
        reference: source of the figures.
    """

    memory: float
    bandwidth: float
    link: str
    reference: str

    @property
    def usable(self) -> float:
        """Bytes for a model: the rest is the driver's, NCCL's and the allocator's."""
        return self.memory * _USABLE


_USABLE = 0.9
"""vLLM's default for the same purpose (`gpu_memory_utilization`)."""

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_NCCL = "latencies: tree, LL, of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"

LINKS = {
    "nvlink2": Link(150e9, 0.6e-6, f"{_NVIDIA}v100/: 300 GB/s both ways; {_NCCL}"),
    "nvlink3": Link(300e9, 0.6e-6, f"{_NVIDIA}a100/: 600 GB/s both ways; {_NCCL}"),
    "nvlink4": Link(450e9, 0.6e-6, f"{_NVIDIA}h100/: 900 GB/s both ways; {_NCCL}"),
    "nvlink5": Link(900e9, 0.6e-6, f"{_NVIDIA}hgx/: 1.8 TB/s both ways; {_NCCL}"),
    "xgmi3": Link(448e9, 1.0e-6, f"{_MI300X}: 7 links of 128 GB/s both ways; {_NCCL}, as PCI"),
    "pcie4": Link(32e9, 1.0e-6, f"PCI Express 4.0, 16 lanes, 64 GB/s both ways; {_NCCL}"),
    "pcie4-host": Link(
        *(16e9, 2.0e-6),
        "by way of the host's memory, as GeForce cards have no peer-to-peer copies: AMD_BW of"
        f" https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h; {_NCCL}, two hops of PCI",
    ),
    "pcie5": Link(64e9, 1.0e-6, f"PCI Express 5.0, 16 lanes, 128 GB/s both ways; {_NCCL}"),
}

DEVICES = {
    "v100": Device(32e9, 900e9, "nvlink2", f"{_NVIDIA}v100/"),
    "a100-40gb": Device(40e9, 1555e9, "nvlink3", f"{_NVIDIA}a100/"),
    "a100": Device(80e9, 2039e9, "nvlink3", f"{_NVIDIA}a100/"),
    "h100-pcie": Device(80e9, 2000e9, "pcie5", _HOPPER),
    "h100": Device(80e9, 3350e9, "nvlink4", f"{_NVIDIA}h100/"),
    "h200": Device(141e9, 4800e9, "nvlink4", f"{_NVIDIA}h200/"),
    "b200": Device(180e9, 8000e9, "nvlink5", f"{_NVIDIA}hgx/"),
    "l4": Device(24e9, 300e9, "pcie4", f"{_NVIDIA}l4/"),
    "l40s": Device(48e9, 864e9, "pcie4", f"{_NVIDIA}l40s/"),
    "rtx4090": Device(24e9, 1008e9, "pcie4-host", _ADA),
    "mi300x": Device(192e9, 5300e9, "xgmi3", _MI300X),
}  # fmt: skip


def device_named(name: str) -> Device:
    """Return an entry of `DEVICES`.

    Raises:
        ParallelError: there is none of that name.
    """
    if name not in DEVICES:
        hint = did_you_mean(name, DEVICES) or f"; it takes {', '.join(DEVICES)}"
        raise ParallelError(f"device is {name!r}, which is none that is known{hint}")
    return DEVICES[name]
