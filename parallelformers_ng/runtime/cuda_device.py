"""Selects the CUDA device of a rank, with a helpful error if CUDA cannot use the device.

The caller counts devices with NVML, which needs no CUDA context (`torch.cuda.device_count`). CUDA may have fewer
devices: CUDA shows a process only one slice of a device in MIG mode, and a driver may be too old for a listed device.
"""

from __future__ import annotations

import torch

from parallelformers_ng.errors import StartupError

NCCL_PHASE = "connecting to its peers by NCCL"  # phase that a rank reports while it connects with NCCL, which may hang
NCCL_REMEDY = (
    " NCCL hangs on machines where copies between devices do not work, for example virtual machines or machines with an"
    " IOMMU: NCCL_P2P_DISABLE=1 in the environment turns these copies off."
)


def take_device(device: torch.device) -> None:
    listed = torch.cuda.device_count()  # counted by NVML, the same as in the caller
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if not torch.cuda.is_initialized():
            raise StartupError(
                f"CUDA cannot be used on {device}: {reason}. The driver lists {listed} devices; this torch was built"
                f" for CUDA {torch.version.cuda}. Install a newer driver, or a torch built for an older CUDA"
            ) from error
        raise StartupError(
            f"CUDA does not have {device}: {reason}. The driver lists {listed} devices and CUDA has"
            f" {torch.cuda.device_count()}. CUDA shows a process only one slice of a device in MIG mode: name a slice"
            " for each rank in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists slices as MIG-…), or set a smaller num_gpus="
        ) from error
