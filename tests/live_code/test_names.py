"""Tests that a global of the program counts only if the model's code looks it up as a global."""

from __future__ import annotations

import types

import torch

from parallelformers_ng.live_code.reach import reach

CODE = """
from torch import nn

SCALE = 2.0

class Mine(nn.Module):
    def forward(self, x):
        def scaled(part):
            return part * SCALE
        return [scaled(part) for part in self.model(x)]
"""


def test_attributes_are_no_globals() -> None:
    program = types.ModuleType("program_of_a_test")
    exec(CODE, vars(program))
    program.model = object()
    program.x = torch.zeros(2).to(torch.float8_e4m3fn)
    places = {place for place in reach([program.Mine]) if place.startswith("program_of_a_test:")}
    assert "program_of_a_test:SCALE" in places
    assert not places & {"program_of_a_test:model", "program_of_a_test:x"}
