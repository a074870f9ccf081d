"""Generate with a whole model and with the same model on several workers, and compare the tokens.

The script has no `if __name__ == "__main__"` guard, because the workers do not import the script.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from parallelformers_ng import parallelize

DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"
STRATEGIES = {
    "greedy": {"do_sample": False, "no_repeat_ngram_size": 4},
    "beam": {"do_sample": False, "num_beams": 5, "no_repeat_ngram_size": 4},
}

parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--model", default=str(DEMO_MODEL), help="model folder, or name on the Hugging Face hub")
parser.add_argument(
    "--num-gpus", type=int, default=2, help="number of workers: one per GPU, or CPU processes without GPUs"
)
parser.add_argument("--max-new-tokens", type=int, default=60)
parser.add_argument("--prompt", default="And it came to pass in those days, that the king")
parser.add_argument(
    "--dtype",
    default="float32",
    help="data type of the weights; in 16 bits, another order of sums may change the tokens without an error",
)
options = parser.parse_args()


def generate(model: PreTrainedModel, title: str) -> dict[str, list[int]]:
    """Generate once with each strategy, print texts and seconds, and return the token ids of each strategy."""
    print(f"\n== {title}")
    model.generate(**inputs, max_new_tokens=2)  # the first call is not timed, because it includes one-time preparations
    tokens = {}
    for strategy, arguments in STRATEGIES.items():
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=options.max_new_tokens, **arguments)
        seconds = time.perf_counter() - start
        tokens[strategy] = output[0].tolist()
        print(f"\n{strategy}, {seconds:.2f} s:\n{tokenizer.decode(output[0], skip_special_tokens=True)}")
    return tokens


def describe_difference(strategy: str, whole: list[int], sharded: list[int]) -> str:
    """Return a description of the first difference between two token sequences."""
    pairs = enumerate(zip(whole, sharded, strict=False))
    parting = next((i for i, (a, b) in pairs if a != b), min(len(whole), len(sharded)))
    return (
        f"{strategy}: {len(whole)} tokens whole, {len(sharded)} sharded; first difference at token {parting}\n"
        f"  common:  …{tokenizer.decode(whole[max(0, parting - 12) : parting])!r}\n"
        f"  whole:   {tokenizer.decode(whole[parting : parting + 12])!r} {whole[parting : parting + 12]}\n"
        f"  sharded: {tokenizer.decode(sharded[parting : parting + 12])!r} {sharded[parting : parting + 12]}"
    )


tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)

# If the workers run on GPUs, the whole model is timed on a GPU too.
if torch.cuda.device_count() >= options.num_gpus:
    inputs = inputs.to("cuda")
    whole = generate(model.to("cuda"), "whole, on one GPU")
    model.to("cpu")
else:
    whole = generate(model, "whole, in this process")

print(f"\n== parallelize(model, num_gpus={options.num_gpus})\n")
parallelize(model, num_gpus=options.num_gpus, verbose="detail")
sharded = generate(model, f"sharded over {options.num_gpus} workers")

different = [strategy for strategy in STRATEGIES if whole[strategy] != sharded[strategy]]
print(f"\ntokens equal: {'no' if different else 'yes'}")
for strategy in different:
    print(describe_difference(strategy, whole[strategy], sharded[strategy]))
print(f"memory allocated, bytes per device: {model.memory_allocated()}")
model.deparallelize()
sys.exit(1 if different else 0)
