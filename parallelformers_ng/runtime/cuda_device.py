"""The CUDA device of a rank, and what is said where CUDA does not have it.

The caller counts devices by NVML, which needs no context (`torch.cuda.device_count`). CUDA may have fewer: a device in
MIG mode is listed, of whose slices CUDA shows one to a process; and a driver may list devices that it is too old for.
"""

from __future__ import annotations

import torch

from parallelformers_ng.errors import StartupError

NCCL_PHASE = "connecting to its peers by NCCL"
"""What a rank says that it does while NCCL may hang."""
NCCL_REMEDY = (
    " NCCL hangs on machines that have no working copies between devices, virtual ones say, or ones with an IOMMU:"
    " NCCL_P2P_DISABLE=1 in the environment does without these."
)


def take_device(device: torch.device) -> None:
    """Make a device the current one of this process.

    Raises:
        StartupError: CUDA does not have it. The message says how many it has, and what may be done.
    """
    listed = torch.cuda.device_count()  # by NVML, as the caller counted
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
            f" {torch.cuda.device_count()}. Of devices in MIG mode it shows one slice to a process: name one for each"
            " rank in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them as MIG-…), or ask for fewer ranks with num_gpus="
        ) from error
