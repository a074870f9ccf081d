"""Measures the start of workers, as forks of a warm process and as fresh processes, in turns.

python -m benchmarks.startup [--rounds 5] [--kills 100] [--json OUT]

Every round starts one interpreter of each kind. A start is `parallelize` and `deparallelize` of a tiny Llama. It is
measured in seconds, and in processor time of all workers and of the fork server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks import measure
from parallelformers_ng.runtime.forks import SWITCH

RUNNER = "parallelformers_ng.worker.runner:ModelRunner"


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def _parallelize(world_size: int) -> None:
    from parallelformers_ng import parallelize

    model = tiny_llama()
    parallelize(model, world_size, workers={"device": "cpu"})
    model.deparallelize()


def _processor_seconds() -> float:
    """Return the processor time of all descendants of this process, ended ones included."""
    descendants = psutil.Process().children(recursive=True)
    mine = psutil.Process().cpu_times()
    times = [process.cpu_times() for process in descendants]
    ended = mine.children_user + mine.children_system
    return ended + sum(each.user + each.system + each.children_user + each.children_system for each in times)


def starts() -> dict[str, float]:
    """Measure a first start, later starts, and the memory of idle ranks; needs a new interpreter."""
    import torch  # noqa: F401 a caller with a model has imported torch and transformers
    from transformers import LlamaForCausalLM  # noqa: F401

    from parallelformers_ng.runtime import forks
    from parallelformers_ng.runtime.group import WorkerGroup

    times = {"first, 2 ranks": measure.seconds(lambda: _parallelize(2))}
    times["second, 2 ranks"] = measure.seconds(lambda: _parallelize(2))
    before = _processor_seconds()
    times["second, 8 ranks"] = measure.seconds(lambda: _parallelize(8))
    times["processor, 8 ranks"] = _processor_seconds() - before
    server = forks.running()
    with WorkerGroup(8, target=RUNNER) as group:
        pids = group.pids + ([server.pid] if server else [])
        times["PSS of 8 ranks and their server, MB"] = sum(measure.memory(pid)["Pss"] for pid in pids) / 1e6
        dirty = max(measure.memory(pid)["Private_Dirty"] for pid in group.pids)
        times["most Private_Dirty of a rank, MB"] = dirty / 1e6
    with WorkerGroup(1, target=RUNNER) as group:
        times["PSS of one rank, MB"] = measure.memory(group.pids[0])["Pss"] / 1e6
    return times


def restarts(kills: int) -> list[float]:
    """Return the seconds from the end of a rank until the model can be called again; needs a new interpreter."""
    from parallelformers_ng import parallelize
    from parallelformers_ng.model.parallelized import deployment_of

    model = tiny_llama()
    parallelize(model, 2, workers={"device": "cpu", "max_restarts": 10 * kills})
    times = []
    for number in range(kills):
        deployment = deployment_of(model)
        pids = deployment.pids
        begun = time.perf_counter()
        os.kill(pids[number % 2], 9)
        while deployment.incarnation == number:
            time.sleep(0.005)
        deployment.replicas[0].ready(time.monotonic() + 60)
        times.append(time.perf_counter() - begun)
    return times


def imports() -> float:
    """Return the processor seconds of a rank's imports; needs a new interpreter."""
    import parallelformers_ng.worker.imports  # noqa: F401

    return time.process_time()


def _apart(expression: str, switch: str) -> Any:
    code = f"import json; from benchmarks import startup; print(json.dumps(startup.{expression}))"
    environment = os.environ | {SWITCH: switch, "TQDM_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kills",
        type=int,
        default=100,
        help="number of killed forked ranks; a tenth as many fresh processes are killed",
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    switches = {"fresh processes": "0", "forks": "1"}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in switches}
    for _ in range(options.rounds):
        for name, switch in switches.items():
            runs[name].append(_apart("starts()", switch))
    figures = {
        what: {name: [run[what] for run in results] for name, results in runs.items()} for what in runs["forks"][0]
    }
    figures["kill to ready again"] = {
        "fresh processes": _apart(f"restarts({max(1, options.kills // 10)})", "0"),
        "forks": _apart(f"restarts({options.kills})", "1"),
    }
    for what, results in figures.items():
        measure.report(
            what, "MB" if "MB" in what else "s", results, against="" if "kill" in what else "fresh processes"
        )
    again = sorted(figures["kill to ready again"]["forks"])
    print(f"  forks: 95th percentile of {len(again)}: {again[int(0.95 * len(again))]:.3f} s")
    one = [float(_apart("imports()", "1")) for _ in range(options.rounds)]
    measure.report("processor, one import", "s", {"of what a rank needs": one})
    measure.save(options.json, "startup", figures | {"processor, one import": {"import": one}})


if __name__ == "__main__":
    main()
