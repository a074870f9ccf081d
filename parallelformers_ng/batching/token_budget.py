"""Chooses how many prompt tokens and steps a round has, from the durations of earlier rounds."""

from __future__ import annotations

import math

from parallelformers_ng.batching.rounds import Round, RoundOutput

_ROUND_SECONDS = 0.02
"""Target seconds of a round with short steps; a new call waits at most one round. Sending a round takes 0.2 ms."""
_MIN_SECONDS = 1e-6  # avoids a division by 0 if a test freezes the clock
_MAX_STEPS = 8
_MIN_CHUNK, _FIRST_CHUNK = 8, 128
"""Prompt tokens in a round: the minimum, and the number before the speed is known."""
_SHARE_OF_PATIENCE = 0.8
"""Share of the patience that the prompt tokens of a round should take: a round may be slower than expected."""
_FIXED_SHARE = 0.5
"""Fixed time of a pass over prompts, beside its time per token, as a share of a decode step's time. Both read all
weights; a pass also computes. Measured: 0.3 to 0.75 (two CPU ranks, 600M, bf16, step of 60 ms, 64 to 256 tokens)."""
_WIDEST_CHUNK = {"cpu": 1024, "cuda": 4096}
"""Most prompt tokens in a round, for each kind of device. A round in which no row waits for its next token uses this
maximum, which bounds the memory of the forward pass."""


class TokenBudget:
    """The sizes of the next round.

    Args:
        patience: longest time that rows may wait for a pass of prompts, beside the time of a step, in seconds.
        device: type of the device that computes, "cpu" or "cuda".

    Attributes:
        step_seconds: duration of a step of the rows; 0 if not measured yet.
        steps: number of decode steps in a round while no prompt waits.
        widest: most prompt tokens in a round if no row waits for its next token.
    """

    def __init__(self, patience: float, device: str) -> None:
        self.step_seconds, self.steps, self.widest = 0.0, 1, _WIDEST_CHUNK[device]
        self._patience = patience
        self._latest_speed = math.inf  # prompt tokens per second of the latest pass
        self._speed = 0.0  # prompt tokens per second on rank 0, without the fixed time of a pass; 0 if not measured yet

    @property
    def chunk(self) -> int:
        """Number of prompt tokens that a round runs beside a decode step, so that its rows wait at most `patience`.

        The number is 4, 5, 6 or 7 times a power of two, so that small changes of the speed do not change a prompt's
        chunks.
        """
        if not self._speed:
            return _FIRST_CHUNK
        seconds = _SHARE_OF_PATIENCE * self._patience + (1 - _FIXED_SHARE) * self.step_seconds
        tokens = max(_MIN_CHUNK, min(int(self._speed * seconds), self.widest))
        least = 1 << tokens.bit_length() - 3
        return tokens // least * least

    def measure(self, order: Round, output: RoundOutput, seconds: float) -> None:
        """Adjust the sizes of the next rounds to the duration of the round that has just ended."""
        typical = order.chunk // 2 if self._speed else 0  # a pass of fewer tokens takes almost as long, and says little
        if output.prompt_tokens >= max(_MIN_CHUNK, typical):
            # Limit the fixed time to a quarter of the pass: on a cold processor, a step takes several times as long.
            fixed = min(_FIXED_SHARE * self.step_seconds, output.prompt_seconds / 4)
            speed = output.prompt_tokens / max(output.prompt_seconds - fixed, _MIN_SECONDS)
            # Later tokens of a prompt attend to more tokens: expect the next chunk to be slower by the same factor.
            trend = min(1.0, speed / self._latest_speed) if output.prompt_begin else 1.0
            # A lower speed counts at once, so that rows do not wait. A higher speed counts fully only after a wide
            # pass, because the speed of short passes varies.
            is_wide = output.prompt_tokens >= 2 * order.chunk
            self._speed = _careful(self._speed, speed * trend, 1.0 if is_wide else 1 / 2)
            self._latest_speed = speed
        elif not output.prompt_tokens:
            step = max((seconds - output.prompt_seconds) / order.steps, _MIN_SECONDS)
            self.step_seconds = _careful(self.step_seconds, step, 1 / 8)  # one slow step must not lengthen the chunks
            self.steps = max(1, min(_MAX_STEPS, int(_ROUND_SECONDS / step)))

    def use_less_memory(self) -> bool:
        """Limit the prompt tokens of a round to those of a CPU, to save memory. Return whether the limit is new."""
        before, self.widest = self.widest, min(self.widest, _WIDEST_CHUNK["cpu"])
        return self.widest < before


def _careful(known: float, measured: float, weight: float) -> float:
    """Return a new estimate: the smaller of `measured` and its average with `known`, which is 0 at first."""
    return min(known * (1 - weight) + measured * weight, measured) if known else measured
