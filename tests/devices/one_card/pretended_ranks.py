"""Ranks that share a pretended device over the pretended NCCL, which is older than 2.30. Only workers import this."""

from __future__ import annotations

from tests.devices.one_card.host_id import pretend_own_host
from tests.pretend_cuda.worker import PretendedRunner  # noqa: F401  # the target of the groups

pretend_own_host()
