"""Measures decoding with a memory limit of a third of the model, compared with accelerate's `device_map`.

python -m benchmarks.offload [--layers 24] [--tokens 8] [--rounds 3] [--folder DIR]

A checkpoint of random weights (a Llama shape in float32, 1.3 GB with 24 layers) is made in a temporary directory and
removed afterwards. Each contestant runs in a control group of memory, without swap; the group counts file pages, too.
Both groups have the same limit: the memory of our processes before loading, a third of the checkpoint, one layer, and a
reserve. accelerate's single process is smaller than our three processes, so its weights get more room. All other
weights are on disk. Both contestants use the same cores. If the system forbids control groups, each contestant runs
without a limit, with a third of the checkpoint in memory, and the report says so. The contestants take turns; the first
token is not counted.

    ours        parallelize("directory", 2, fit={"max_memory": …, "offload_folder": …})
    accelerate  from_pretrained("directory", device_map="auto", max_memory=…, offload_folder=…), one process, all cores
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.control_groups import Group, control_group

WAYS = ("ours", "accelerate")
RANKS = 2
SPARE = 64 << 20  # memory for activations, modules and tables of the model


def tiny() -> Any:
    """Return a tiny model; a run with this model imports all necessary code."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, eos_token_id=None, bos_token_id=None)).eval()


def make_checkpoint(directory: Path, layers: int) -> tuple[int, int]:
    """Write the checkpoint. Returns its bytes, and the bytes of one layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="300MB")
    drop_from_cache(directory)
    sizes = [sum(p.nbytes for p in module.parameters()) for module in (model, model.model.layers[0])]
    torch.manual_seed(0)
    return sizes[0], sizes[1]


def drop_from_cache(directory: Path) -> None:
    """Drop all pages of the files from the page cache."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def contend(
    way: str, directory: str, folder: str, group: Group, room: int, layer: int, limit: int, tokens: int
) -> dict[str, Any]:
    """Load and decode in this process and its child processes. With a memory limit, the room for weights is the unused
    part of the limit."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1 if way == "ours" else RANKS)
    if way == "ours":
        from parallelformers_ng import parallelize, start_group

        with start_group(RANKS, device="cpu") as workers:
            with parallelize(tiny(), workers=workers, progress=False) as model:
                decode(model, 1)
            limit = group.used() + room + layer + SPARE
            group.limit_to(limit)
            memory = {**dict.fromkeys(range(RANKS), room // RANKS), "cpu": 0}
            fit = {"max_memory": memory, "offload_folder": folder}
            model = parallelize(directory, workers=workers, fit=fit, progress=False)
            return {**decode(model, tokens), "room": room, "limit": limit, "peak": group.peak()}
    decode(tiny(), 1)
    if group.path:
        room = limit - group.used() - layer - SPARE
        group.limit_to(limit)
    model = AutoModelForCausalLM.from_pretrained(
        directory, device_map="auto", max_memory={"cpu": room}, offload_folder=folder, dtype=torch.float32
    )
    return {**decode(model, tokens), "room": room, "limit": limit, "peak": group.peak()}


def decode(model: Any, tokens: int) -> dict[str, Any]:
    """Return the tokens, and the tokens per second after the first token."""
    import torch

    prompt = torch.arange(1, 9).view(1, 8)
    model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    times: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    output = model.generate(
        prompt, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, do_sample=False, pad_token_id=0, streamer=Clock()
    )
    return {"rate": tokens / (times[-1] - times[1]), "tokens": output[0, 8:].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="folder for the files; by default the folder for temporary files")
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend:
        way, directory, folder, group, *sizes = json.loads(options.contend)
        its = Group(group)
        its.join()
        print(json.dumps(contend(way, directory, folder, its, *sizes, options.tokens)))
        return
    print(measure.machine())
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        directory, folder = Path(place, "checkpoint"), Path(place, "offload")
        size, layer = make_checkpoint(directory, options.layers)
        for _ in range(options.rounds):
            for way in WAYS:
                folder.mkdir(exist_ok=True)
                drop_from_cache(directory)
                with control_group(way) as group:
                    limit = results["ours"][-1]["limit"] if results["ours"] else 0
                    what = json.dumps([way, str(directory), str(folder), group, size // 3, layer, limit])
                    command = [sys.executable, "-m", "benchmarks.offload", "--contend", what]
                    done = subprocess.run(
                        [*command, "--tokens", str(options.tokens)], stdout=subprocess.PIPE, text=True, check=True
                    )
                results[way].append(json.loads(done.stdout.splitlines()[-1]))
                print(way, {key: value for key, value in results[way][-1].items() if key != "tokens"}, flush=True)
    alike = len({tuple(each["tokens"]) for runs in results.values() for each in runs}) == 1
    rates = {way: statistics.median(each["rate"] for each in runs) for way, runs in results.items()}
    rooms = ", ".join(f"{runs[-1]['room'] / 1e9:.2f} GB for those of {way}" for way, runs in results.items())
    limited = "" if results["accelerate"][-1]["peak"] else "; NO LIMITS: no control group could be made"
    print(f"{size / 1e9:.2f} GB of weights, {rooms}{limited}")
    print(f"tokens equal: {'yes' if alike else 'no'}")
    for way, rate in rates.items():
        each = ", ".join(f"{run['rate']:.2f}" for run in results[way])
        print(f"{way:12} {rate:.2f} tokens/s, the median of {each}")
    print(f"ratio        {rates['ours'] / rates['accelerate']:.2f}")


if __name__ == "__main__":
    main()
