"""torch.distributed's gloo, over the loopback interface: the last resort where shared memory cannot be used."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.communicator import give_way, sum_in_rank_order, summable_in_place
from parallelformers_ng.collectives.process_group import ProcessGroupCommunicator


class GlooCommunicator(ProcessGroupCommunicator):
    """CPU collectives over loopback sockets. Slow on small tensors (10 to 50 times shared memory)."""

    def sum(self, tensor: Tensor) -> Tensor:
        # Gloo sums in an order of its own; gathered parts are summed in rank order, with the bits of shared memory.
        out = summable_in_place(tensor)
        return sum_in_rank_order(self._gather(out, "all_reduce"), out=out)

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from the stub
        # The device named here spares the environment a GLOO_SOCKET_IFNAME.
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=self._timeout)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _finish(self, work: Any, operation: str) -> None:
        """Waits on the host, with an eye on the abort word."""
        start = time.monotonic()
        while not work.is_completed():
            self._check_aborted()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._give_up(f"rank {self.rank}: {operation} did not end within {self._timeout:g} s")
            give_way(waited)
        try:
            work.wait()
        except RuntimeError as error:  # a peer's connection broke
            self._give_up(f"rank {self.rank}: {operation} failed: {error}", error)
