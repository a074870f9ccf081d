"""The messages of a round between the caller and the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelformers_ng.runtime.failures import Description
from parallelformers_ng.sharding.active_adapters import ActiveAdapters


@dataclass(frozen=True)
class Schedule:
    """The scheduler's decision about one round.

    Attributes:
        admitted: numbers of the waiting calls that get a row, in the order in which their prompts run.
        max_tokens: most prompt tokens of the round's pass; 0 for one whole prompt.
        late_tokens: completed prompts of so many tokens together join in the next round, because other rows would wait
            too long for both; 0 if all join in this round.
        steps: number of decode steps if no prompt is left after the pass.
        steps_between_prompts: number of decode steps if prompts are left, beside or after the pass.
        chunk: most prompt tokens of a pass beside decoding rows; 0 if prompts do not run in chunks.
    """

    admitted: tuple[int, ...] = ()
    max_tokens: int = 0
    late_tokens: int = 0
    steps: int = 1
    steps_between_prompts: int = 1
    chunk: int = 0


@dataclass
class Round:
    """The caller's instructions to the ranks for one round."""

    batch: int  # number of the batch; ranks drop the rows of an earlier batch
    # Number of a new row → `message.parcel` of its call of `generate`, and the seed of its random stream or None.
    joins: dict[int, tuple[bytes, int, int | None]]
    leaves: list[int]  # numbers of rows whose callers stopped waiting
    schedule: Schedule
    prefixes: int  # most tokens in the prefix cache
    adapters: ActiveAdapters | None = None  # active adapters of all rows; None for a model without adapters
    positions: int = 0  # most rows × tokens of a cache whose steps become CUDA graphs; 0 for no CUDA graphs
    max_rows: int = 1  # most rows of the batch
    # Number of a row → `message.parcel` of the changes that the caller's other threads made to its processors and
    # criteria.
    updates: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        steps = self.schedule.steps
        return f"round of batch {self.batch}: rows {[*self.joins]} join, {self.leaves} leave, {steps} steps"


@dataclass
class RoundOutput:
    """One rank's report of a round."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # number of a row → its new tokens
    ended: list[int] = field(default_factory=list)  # numbers of rows that have ended without an error
    late: list[int] = field(default_factory=list)  # numbers of rows whose prompts have run, and that join later
    # Number of a failed row → the error, or None if another rank raised the error. All ranks raise errors of
    # arguments; only the rank that chooses the row's tokens raises errors of processors.
    failed: dict[int, Description | None] = field(default_factory=dict)
    # Number of a row → `message.parcel` of the new states of its processors and criteria; only from the rank that
    # chooses the row's tokens.
    states: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    prompt_tokens: int = 0  # number of prompt tokens that ran, padding included
    # Number of the last prompt's first tokens that did not run in this round, because the cache had their keys and
    # values.
    prompt_begin: int = 0
    prompt_seconds: float = 0.0  # seconds that this rank took to run prompt tokens, or to add new rows to the batch
    steps: int = 0  # decode steps that ran after the prompts, with at least one row at their start
    token_bytes: int = 0  # bytes of one token's keys and values on this rank; 0 if no row runs
    pads: bool = True  # whether every row takes the memory of the longest row
    free_bytes: int = 0  # free bytes of the rank's CUDA device; 0 on CPU
    uncaptured: str = ""  # reason why steps could not become CUDA graphs; "" without such a failure
