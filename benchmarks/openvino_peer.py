"""Runs OpenVINO GenAI's continuous batching for `benchmarks.callers`.

    PYTHON benchmarks/openvino_peer.py DIRECTORY PRECISION THREADS

PYTHON is an interpreter with `openvino-genai` and `optimum-intel[openvino]`. DIRECTORY holds a transformers checkpoint;
its subfolder `openvino` receives the exported model at the first run. PRECISION is `f32` or `bf16`. Each line of
standard input is the JSON of a task, `{"prompts": [[token id, …], …], "new": number of new tokens}`; each line of
standard output is the time of the task in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # the folder of this script, whose modules would hide packages with the same names
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the libraries print to standard output

import numpy  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402


def exported(directory: Path) -> Path:
    """Return the folder of the exported model, with weights in fp32. The precision is chosen at loading."""
    folder = directory / "openvino"
    if not folder.exists():
        from optimum.exporters.openvino import main_export

        main_export(str(directory), folder, task="text-generation-with-past", convert_tokenizer=False)
    return folder


def pipeline(directory: Path, precision: str, threads: int) -> Any:
    """Return OpenVINO's pipeline, with the scheduler options that were fastest here."""
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.cache_size = 512, 32, 1
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    return genai.ContinuousBatchingPipeline(exported(directory), scheduler, "CPU", settings)


def main() -> None:
    directory, precision, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = pipeline(directory, precision, threads)
    print(json.dumps("ready"), file=ANSWERS, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        config = genai.GenerationConfig(
            max_new_tokens=task["new"], min_new_tokens=task["new"], ignore_eos=True, do_sample=False
        )
        config.set_eos_token_id(2)  # a model without an end token is refused; `ignore_eos` goes on past this one
        prompts = [openvino.Tensor(numpy.array([ids], numpy.int64)) for ids in task["prompts"]]
        begin = time.perf_counter()
        results = model.generate(prompts, [config] * len(prompts))
        taken = time.perf_counter() - begin
        assert all(len(result.m_generation_ids[0]) == task["new"] for result in results)
        print(json.dumps(taken), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
