"""Lists the tiny models of all written policies."""

from __future__ import annotations

from tests.zoo import (
    classics,
    composites,
    decoders,
    encoders,
    multimodal,
    pictured,
    readers,
    recent,
    seq2seq,
    state_space,
    vision_audio,
)
from tests.zoo.case import Case

CASES: list[Case] = [
    *decoders.CASES, *encoders.CASES, *classics.CASES, *seq2seq.CASES, *composites.CASES, *vision_audio.CASES,
]  # fmt: skip
NEWER: list[Case] = [*recent.CASES, *state_space.CASES, *readers.CASES, *multimodal.CASES, *pictured.CASES]
"""Models with newer blocks; most share a layout with an older model, so fewer tests run them."""
ALL = [*CASES, *NEWER]
