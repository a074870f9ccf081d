"""Chooses the next tokens of the rows of a batch on a rank. All ranks get the same tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching.penalties import penalized
from parallelformers_ng.batching.row import ENDED, FAILED, GOES_ON, BatchRow
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.sharding import look_ups


class Newest:
    """The newest token of each greedy row: on the device, and in an asynchronous copy to the host.

    The copy is queued at once. So the host waits only for the step that chose these tokens, and not for a later step
    that is queued before the host reads them. The copy also has the bounds of the ids that embeddings have looked up.
    """

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_device = on_device
        numbers = torch.cat((on_device.flatten(), *look_ups.bounds()))
        self._on_host = numbers.to("cpu", non_blocking=True)  # page-locked memory, so that the host does not wait
        self._has_arrived = torch.cuda.Event()
        self._has_arrived.record()

    def give(self, rows: list[BatchRow], places: list[int]) -> None:
        """Wait until the tokens are on the host, and add to each row the token of its batch slot in `places`."""
        self._has_arrived.synchronize()
        numbers = self._on_host.tolist()
        look_ups.check(numbers[len(self.on_device) :])
        for row, place in zip(rows, places, strict=True):
            row.take(numbers[place], row.after(numbers[place]))


class Choice:
    """Chooses the next tokens of rows, together with the other ranks."""

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator

    def choose(self, rows: list[BatchRow], logits: torch.Tensor, places: list[int]) -> torch.Tensor | None:
        """Choose each row's next token from logits, `[slots, vocabulary]`. `places` has the batch slot of each row.

        On the CPU, each rank chooses for a share of the rows, and all ranks gather the tokens. On a device, rank 0
        chooses for all greedy rows at once, and the host waits once.

        Return the newest token of each batch slot on the device, int64 `[slots, 1]`; None on the CPU.
        """
        if (newest := self.best(rows, logits)) is not None:
            newest.give(rows, places)
            return newest.on_device
        on_device = logits.device.type != "cpu"
        ranks = 1 if self._communicator is None else self._communicator.world_size
        chosen = self._chosen_here(rows, logits, places)
        if self._communicator is not None:
            chosen = self._communicator.all_gather(chosen, 0)
        newest_ids = [chosen[0, 0, :1]] * len(logits)  # a free slot needs some id, which has no effect
        for index, (row, outcomes) in enumerate(zip(rows, chosen.transpose(0, 1).tolist(), strict=True)):
            owner = row.number % ranks
            token, outcome = outcomes[owner]
            newest_ids[places[index]] = chosen[owner, index, :1]
            if row.greedy is not None:
                row.take(token, row.after(token))
            else:
                row.take(token, outcome, newest_ids[places[index]][None] if on_device else None)
        return torch.stack(newest_ids) if on_device else None

    def best(self, rows: list[BatchRow], logits: torch.Tensor) -> Newest | None:
        """Return the tokens with the largest logits, which rank 0 chooses for all ranks; None on the CPU, or if not all
        rows are greedy. The method does not wait for the device."""
        if logits.device.type == "cpu" or any(row.greedy is None for row in rows):
            return None
        newest = logits.max(-1, keepdim=True).indices
        return Newest(newest if self._communicator is None else self._communicator.all_gather(newest[None], 0)[0])

    def _chosen_here(self, rows: list[BatchRow], logits: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Choose for this rank's share of the rows. Return token and outcome of each row, int64 `[1, rows, 2]`, with
        any numbers for rows of other ranks. The outcome of a greedy row is GOES_ON: the caller calls
        `BatchRow.after`."""
        rank, ranks = (0, 1) if self._communicator is None else (self._communicator.rank, self._communicator.world_size)
        own = [index for index, row in enumerate(rows) if row.number % ranks == rank]
        scores = {index: logits[places[index], None] for index in own if rows[index].greedy is None}
        if penalized_rows := [index for index in scores if rows[index].call.penalties is not None]:
            penalties = [each for index in penalized_rows if (each := rows[index].call.penalties) is not None]
            sequences = [rows[index].ids[0] for index in penalized_rows]
            changed = penalized(_of(logits, [places[index] for index in penalized_rows]).float(), sequences, penalties)
            scores.update(zip(penalized_rows, changed.split(1), strict=True))
        chosen = {index: rows[index].choose(each) for index, each in scores.items()}
        if logits.device.type != "cpu":
            best = pad(logits.max(-1, keepdim=True).indices, (0, 1), value=GOES_ON)
            choices = [best[place] for place in places]
            for index, choice in chosen.items():  # `choice[1]` is the outcome: False is GOES_ON, True is ENDED
                choices[index] = (
                    torch.full_like(best[0], FAILED) if choice is None else torch.cat((choice[0][0], choice[1].long()))
                )
            return torch.stack(choices)[None]
        mine = [(0, FAILED)] * len(rows)
        if greedy := [index for index in own if rows[index].greedy is not None]:
            best = _of(logits, [places[index] for index in greedy]).max(-1).indices
            for index, token in zip(greedy, best.tolist(), strict=True):
                mine[index] = token, GOES_ON
        for index, choice in chosen.items():
            if choice is not None:
                mine[index] = int(choice[0]), ENDED if choice[1] else GOES_ON
        return torch.tensor([mine])


def _of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return `logits[rows]`; without a copy if the indices have equal distances, so that a slice selects the rows."""
    stride = rows[1] - rows[0] if len(rows) > 1 else 1
    is_range = rows == list(range(rows[0], rows[0] + stride * len(rows), stride))
    return logits[rows[0] : rows[-1] + 1 : stride] if is_range else logits[rows]
