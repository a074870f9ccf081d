"""Lists GPUs and the links between GPUs of one host, with figures from the makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from parallelformers_ng.errors import ParallelError, did_you_mean


@dataclass(frozen=True)
class Link:
    """A link between the devices of one host."""

    bandwidth: float  # bytes per second in each direction
    hop_seconds: float  # latency of a small message to the next device, in seconds

    def exchange_seconds(self, ranks: int, bytes_: float, gathers: bool) -> float:
        """Return the seconds of a sum or a gather of a tensor over the devices of one host.

        The latency is NCCL's own model of a tree (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc). The
        number of bytes is the number that a ring of devices sends. For a tensor of n bytes on k devices, each device
        sends 2 n (k - 1) / k bytes in a sum. In a gather, each device sends half as many bytes.
        """
        ways = 1 if gathers else 2
        return _START_SECONDS + ways * (ranks - 1) * (self.hop_seconds + bytes_ / ranks / self.bandwidth)


_START_SECONDS = 6.8e-6  # seconds that a sum or a gather takes in addition to the time per hop and per byte


@dataclass(frozen=True)
class Device:
    """A kind of GPU."""

    memory: float  # size of its memory in bytes
    bandwidth: float  # bytes per second of its memory
    link: str  # name in `LINKS` of the link between devices of this kind

    @property
    def usable(self) -> float:
        """Bytes of memory for a model: 0.9 of all memory, like vLLM's default of `gpu_memory_utilization`.

        The driver, NCCL and the allocator use the remaining tenth.
        """
        return self.memory * _USABLE


_USABLE = 0.9  # fraction of a device's memory that a model may use; vLLM's default of `gpu_memory_utilization`

# Sources of the figures:
# NVIDIA's data sheets, at https://www.nvidia.com/en-us/data-center/ and v100/, a100/, h100/, h200/, hgx/, l4/ or l40s/;
#   of h100-pcie https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper, and of rtx4090
#   https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
# mi300x and its links: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
# latencies of links: tree, LL, of https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
# pcie4-host: AMD_BW of https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h

LINKS = {
    "nvlink2": Link(150e9, 0.6e-6),  # 300 GB/s both ways
    "nvlink3": Link(300e9, 0.6e-6),  # 600 GB/s both ways
    "nvlink4": Link(450e9, 0.6e-6),  # 900 GB/s both ways
    "nvlink5": Link(900e9, 0.6e-6),  # 1.8 TB/s both ways
    "xgmi3": Link(448e9, 1.0e-6),  # 7 links of 128 GB/s both ways; latency as of PCI
    "pcie4": Link(32e9, 1.0e-6),  # PCI Express 4.0, 16 lanes, 64 GB/s both ways
    # Copies through the host's memory, because GeForce cards have no peer-to-peer copies; two hops of PCI.
    "pcie4-host": Link(16e9, 2.0e-6),
    "pcie5": Link(64e9, 1.0e-6),  # PCI Express 5.0, 16 lanes, 128 GB/s both ways
}

DEVICES = {
    "v100": Device(32e9, 900e9, "nvlink2"),
    "a100-40gb": Device(40e9, 1555e9, "nvlink3"),
    "a100": Device(80e9, 2039e9, "nvlink3"),
    "h100-pcie": Device(80e9, 2000e9, "pcie5"),
    "h100": Device(80e9, 3350e9, "nvlink4"),
    "h200": Device(141e9, 4800e9, "nvlink4"),
    "b200": Device(180e9, 8000e9, "nvlink5"),
    "l4": Device(24e9, 300e9, "pcie4"),
    "l40s": Device(48e9, 864e9, "pcie4"),
    "rtx4090": Device(24e9, 1008e9, "pcie4-host"),
    "mi300x": Device(192e9, 5300e9, "xgmi3"),
}


def device_named(name: str) -> Device:
    if name not in DEVICES:
        hint = did_you_mean(name, DEVICES) or f"; known devices: {', '.join(DEVICES)}"
        raise ParallelError(f"device {name!r} is unknown{hint}")
    return DEVICES[name]
