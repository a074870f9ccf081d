"""Measures loading a checkpoint: time to the first token and memory of all processes, compared with transformers.

python -m benchmarks.loading [--ranks 2] [--repeats 3] [--layers 20] [--only PART …] [--report FILE]

A checkpoint of random weights (a Llama shape in bfloat16, 2.1 GB with 20 layers) is made in a temporary directory and
removed afterwards. Each run has its own processes. The ways of loading take turns:

    ours, ours_new   parallelize("directory"), with running workers, and with workers that the call starts
    cut              parallelize("directory") of a directory that save_sharded wrote
    shard            parallelformers-ng shard, which only writes
    given            parallelize(model) after from_pretrained: the model is already loaded
    whole            from_pretrained in one process
    native           from_pretrained with DistributedConfig(tp_size=ranks) under torchrun; it needs accelerate

"first token" is the time from the loading call to the first token; the interpreter runs and all libraries are imported
before the call. "since start" is the time from the start of the process. "again" is the time of the same token from the
warm model; "first token" minus "again" is the cost of loading. "cold" drops the files from the page cache before the
run; the disk may have its own cache. Memory is measured in separate runs, because sampling takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure

TIMED = ("ours", "ours_new", "cut", "whole", "native")
SAMPLED = ("ours", "cut", "given", "shard", "whole")
PARTS = ("warm", "cold", "memory", "round trip", "damage")
TIMES = ("load", "first_token", "since_start", "again")


def make_checkpoint(directory: Path, layers: int) -> int:
    """Write the checkpoint tensor by tensor, never the whole in memory. Returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from parallelformers_ng.checkpoint.writing import write_safetensors

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(directory)
    state = model.state_dict()
    block = (torch.randn(32000 * 2048) * 0.02).to(torch.bfloat16)
    entries = {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in state.items()}
    file = write_safetensors(
        directory / "model.safetensors", entries, lambda name: block[: state[name].numel()].view(state[name].shape)
    )
    return file.size


def prepare_cache(directory: Path, warm: bool) -> None:
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            if not warm:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while warm and file.read(1 << 24):
                pass


def run(way: str, directory: Path, ranks: int, sampled: bool = False) -> dict[str, Any]:
    """Run one way of loading in new processes. Returns the printed figures, of several ranks those of the slowest."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if way == "native" else []
    arguments = ["-m", "benchmarks.loading_ways", way, str(directory), "--ranks", str(ranks)]
    spawned = ["--spawned", str(time.time()), *(["--sampled"] if sampled else [])]
    command = [sys.executable, *launcher, *arguments, *spawned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    # The output of two ranks may be on one line.
    results = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    if done.returncode or not results:
        raise RuntimeError(f"{way} failed: {done.stderr[-6000:]}")
    return max(results, key=lambda result: ("pss" in result, result.get("first_token")))


def time_all(directory: Path, ranks: int, repeats: int, warm: bool) -> dict[str, dict[str, list[float]]]:
    """Return, for each way, the times of every round, in seconds. A failed way is left out and printed."""
    taken: dict[str, dict[str, list[float]]] = {way: {name: [] for name in TIMES} for way in TIMED}
    for _ in range(repeats):
        for way in list(taken):
            place = directory / "cut" if way == "cut" else directory
            prepare_cache(place, warm)
            try:
                result = run(way, place, ranks)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                del taken[way]
                continue
            for name in TIMES:
                taken[way][name].append(result[name])
    return taken


def check_round_trip(directory: Path, ranks: int) -> dict[str, Any]:
    """Load, save with `save_sharded`, load at another world size, and gather. Reports whether all weights equal the
    file's, bit for bit."""
    import torch
    from safetensors import safe_open

    from parallelformers_ng import parallelize, save_sharded

    saved = directory / "saved"
    with parallelize(str(directory), ranks, workers={"device": "cpu"}) as model:
        start = time.perf_counter()
        save_sharded(model, saved, progress=False)
        seconds = time.perf_counter() - start
    model = parallelize(saved, ranks + 1, workers={"device": "cpu"})
    state = model.deparallelize().state_dict()
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        equal = [name for name in names if torch.equal(file.get_tensor(name), state[name])]
    return {"tensors": len(names), "equal": len(equal), "save_seconds": seconds}


def time_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for temperature in ("warm", "cold"):
        if temperature not in report:
            continue
        rounds = len(report[temperature]["ours"]["load"])
        lines += [
            f"\n### {temperature.capitalize()}: seconds, minimum / median of {rounds} rounds\n",
            "| way | loaded | first token | since start | again |", "| --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for way, times in report[temperature].items():
            cells = [f"{min(times[name]):.2f} / {statistics.median(times[name]):.2f}" for name in TIMES]
            lines.append(f"| {way} | " + " | ".join(cells) + " |")
        for clock, mine in (("first_token", "ours"), ("since_start", "ours_new")):
            for peer in {"whole", "native"}.intersection(report[temperature]):
                pairs = zip(report[temperature][mine][clock], report[temperature][peer][clock], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                lines.append(f"\n{mine}, {clock.replace('_', ' ')}: {ratio:.2f} × {peer} (median of the rounds)")
    return lines


def memory_lines(report: dict[str, Any]) -> list[str]:
    lines = [
        "\n### Memory at the peak, above what the processes held before\n",
        "| way | PSS of all ÷ checkpoint | anonymous, parent [MB] | anonymous, each rank [MB] |",
        "| --- | --- | --- | --- |",
    ]
    for way, result in report["memory"].items():
        ranks = ", ".join(f"{size / 1e6:.0f}" for size in result["rank_anonymous"]) or "–"
        parent = f"{result['parent_anonymous'] / 1e6:.0f}"
        lines.append(f"| {way} | {result['pss'] / report['bytes']:.3f} | {parent} | {ranks} |")
    ours = report["memory"]["ours"]
    shards = ", ".join(f"{size / 1e6:.0f}" for size in ours["shards"])
    return [*lines, f"\nShards: {shards} MB; the largest tensor: {ours['largest'] / 1e6:.0f} MB."]


def lines_of(report: dict[str, Any]) -> list[str]:
    """Return the report as lines of Markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = [
        "# Loading",
        "",
        *(f"`{command}`  " for command in report["commands"]),
        "",
        f"{report['date']}, {machine}  ",
    ]
    lines += [f"checkpoint {report['bytes'] / 1e9:.2f} GB, bfloat16, {report['ranks']} ranks", *time_lines(report)]
    if "memory" in report:
        lines += memory_lines(report)
    if (trip := report.get("round trip")) is not None:
        lines += ["\n### Load → save cut → load at another world size → gather\n"]
        lines += [f"{trip['equal']} of {trip['tensors']} tensors bit-equal; saving took {trip['save_seconds']:.1f} s."]
    if (damage := report.get("damage")) is not None:
        lines += ["\n### Damaged checkpoints\n", ", ".join(f"{name}: {count}" for name, count in damage.items())]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--report", type=Path, help="output file of the report (Markdown); figures are added to a file beside it"
    )
    options = parser.parse_args()
    figures = options.report and options.report.with_suffix(".json")
    report: dict[str, Any] = json.loads(figures.read_text()) if figures and figures.exists() else {"commands": []}
    report["commands"].append("python -m benchmarks.loading " + shlex.join(sys.argv[1:]))
    report |= {"date": time.strftime("%Y-%m-%d"), "machine": measure.machine()}
    report["ranks"] = options.ranks
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        directory = Path(folder)
        report["bytes"] = make_checkpoint(directory, options.layers)
        from parallelformers_ng.model.saving import shard

        shard(folder, directory / "cut", options.ranks, progress=False)
        for temperature in {"warm", "cold"}.intersection(options.only):
            report[temperature] = time_all(directory, options.ranks, options.repeats, temperature == "warm")
        if "memory" in options.only:
            places = {way: directory / "cut" if way == "cut" else directory for way in SAMPLED}
            report["memory"] = {way: run(way, place, options.ranks, sampled=True) for way, place in places.items()}
        if "round trip" in options.only:
            report["round trip"] = check_round_trip(directory, options.ranks)
    if "damage" in options.only:
        from benchmarks.loading_damage import sweep

        report["damage"] = sweep(options.ranks)
    text = "\n".join(lines_of(report)) + "\n"
    print(text)
    if figures:
        options.report.write_text(text, "utf-8")
        figures.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
