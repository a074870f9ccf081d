"""Runs a model on the two ranks of a torchrun job, both on the first device.

torchrun --standalone --nproc-per-node=2 -m tests.devices.one_card.torchrun_script card|pretended MODEL
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.hosts import agent
from parallelformers_ng.model.parallelized import deployment_of
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.place import sharing_a_card

TOKENS = 12


def main() -> None:
    """Run in each process of the job. All processes but the first end in `parallelize`."""
    kind, path = sys.argv[1:]
    launch = agent.startup.launch

    def on_first_device(processes: Any, settings: Any, names: list[str], *more: Any) -> Any:
        return launch(processes, settings, ["cuda:0"] * len(names), *more)

    with pytest.MonkeyPatch.context() as patch:
        if kind == "pretended":
            from tests.pretend_cuda.caller import believe

            believe(patch)
        patch.setattr(torch.cuda, "device_count", lambda: 2)  # of which the second is not used
        patch.setattr(agent.startup, "launch", on_first_device)
        with sharing_a_card():
            inputs, want = without_ties(AutoModelForCausalLM.from_pretrained(path).eval(), TOKENS)
            with parallelize(path, workers={"device": "cuda", "timeout": 60}) as model:
                are_equal = all(torch.equal(greedy(model, inputs, TOKENS), want) for _ in range(3))
                print(f"tokens equal: {are_equal}", flush=True)
                print("pids:", *deployment_of(model).pids, flush=True)


if __name__ == "__main__":
    main()
