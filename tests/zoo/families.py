"""The tiny models of the written policies, all modalities together."""

from __future__ import annotations

from tests.zoo import decoders, encoders, seq2seq, vision_audio
from tests.zoo.case import Case

CASES: list[Case] = [*decoders.CASES, *encoders.CASES, *seq2seq.CASES, *vision_audio.CASES]
