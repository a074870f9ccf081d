"""Measures assisted decoding: greedy `generate` with an assistant that proposes tokens, against `generate` without it.

    python -m benchmarks.assisted [--size 600M] [--assistant 135M] [--dtype bfloat16] [--right 0.7] [--proposals 2 3 4]

Both models have random weights, so the assistant's own proposals would be wrong. A mask with a fixed seed replaces the
proposals, so that the share `--right` of them is what the model chooses. The assistant computes all proposals before
they are replaced. Contestants take turns.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks import measure
from benchmarks.callers import RANKS, whole
from benchmarks.decode import SHAPES
from benchmarks.quantized import QUANTIZE
from parallelformers_ng import parallelize
from parallelformers_ng.sharding.cache_names import CACHE


class Masked(LlamaForCausalLM):
    """An assistant whose proposals a mask replaces.

    Attributes:
        right: token ids of the prompt and of the plain decode.
        share: share of the proposals that are right.
    """

    right: list[int]
    share: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        place = output[CACHE].get_seq_length()
        if place < len(self.right):
            is_wrong = random.Random(place).random() >= self.share
            output.logits[0, -1, (self.right[place] + is_wrong) % self.config.vocab_size] = torch.inf
        return output


def seconds(model: Any, ids: torch.Tensor, new: int, assistant: Any = None, proposals: int = 0) -> float:
    """Return the seconds of one greedy `generate`."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = proposals
        options["assistant_model"] = assistant
    return measure.seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="600M", choices=SHAPES)
    parser.add_argument("--assistant", default="135M", choices=SHAPES)
    parser.add_argument("--vocabulary", type=int, help="tokens of both vocabularies; by default the model's own")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--right", type=float, default=0.7, help="share of the proposals that are right")
    parser.add_argument("--proposals", type=int, nargs="+", default=[2, 3, 4], help="proposals of a round")
    parser.add_argument("--quantize", choices=[name for name, scheme in QUANTIZE.items() if scheme])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    print(measure.machine())
    vocabulary, dtype = options.vocabulary or SHAPES[options.size]["vocab_size"], getattr(torch, options.dtype)
    workers = {"device": "cpu"}
    model: Any = parallelize(whole(options.size, dtype, vocab_size=vocabulary), RANKS, workers=workers, progress=False)
    ids = torch.randint(5, vocabulary, (1, 64))
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens + 8, do_sample=False
    )
    assistant: Any = whole(options.assistant, dtype, Masked, vocab_size=vocabulary)
    assistant.right, assistant.share = answer[0].tolist(), options.right
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    if options.quantize:
        assistant = parallelize(assistant, RANKS, workers=workers, quantize=QUANTIZE[options.quantize], progress=False)
    contestants = {"plain": partial(seconds, model, ids, options.tokens)}
    for count in options.proposals:
        contestants[f"{count} proposals"] = partial(seconds, model, ids, options.tokens, assistant, count)
    for run in contestants.values():  # the first calls are slower
        run()
    figures = measure.interleave(contestants, options.rounds)
    title = f"{options.size} with an assistant of {options.assistant}, {options.right:.0%} of the proposals right"
    measure.report(title, "s", figures, f"{options.proposals[0]} proposals")
    measure.save(options.json, f"assisted, {options.dtype}, {options.quantize or 'not quantized'}", {title: figures})


if __name__ == "__main__":
    main()
