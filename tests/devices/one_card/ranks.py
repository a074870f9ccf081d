"""Ranks that share a CUDA device over NCCL. Only workers import this module."""

from __future__ import annotations

import torch

from parallelformers_ng.worker.runner import ModelRunner  # noqa: F401  # the target of the groups
from tests.devices.one_card.host_id import pretend_own_host

if torch.cuda.nccl.version() < (2, 30):  # later versions read NCCL_MULTI_RANK_GPU_ENABLE
    pretend_own_host()
