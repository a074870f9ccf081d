"""Runs a model in one of several ways, in a process that `benchmarks.decode` starts, pins and measures.

    python benchmarks/contestant.py KIND DIRECTORY

KIND is `one` (transformers in this process), `ours` (parallelformers_ng), `native` (transformers' tensor parallelism),
`deepspeed` (DeepSpeed's AutoTP) or `tensor_parallel`. `native` and `deepspeed` need one such process for each rank,
with torchrun's environment variables. deepspeed and tensor_parallel are imported only for their kinds, so the
interpreter may have other versions of packages. Each line on standard input is a task, and each line on standard output
is the answer, in JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

sys.path.pop(0)  # modules of this script's directory would hide packages of the same name

import torch


def load(kind: str, directory: str) -> Any:
    """Return the model, ready for `generate`."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from transformers import LlamaConfig, LlamaForCausalLM

    if kind == "native":
        from transformers.distributed import DistributedConfig

        torch.distributed.init_process_group("gloo")
        config = DistributedConfig(tp_size=torch.distributed.get_world_size())
        return LlamaForCausalLM.from_pretrained(directory, distributed_config=config).eval()
    if kind == "tensor_parallel":
        return load_tensor_parallel(directory)
    model = LlamaForCausalLM.from_pretrained(directory, config=LlamaConfig.from_pretrained(directory)).eval()
    if kind == "deepspeed":
        import deepspeed

        os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])  # makes DeepSpeed sum through shared memory
        deepspeed.init_distributed("gloo")
        cut = {"tp_size": int(os.environ["WORLD_SIZE"])}
        return deepspeed.init_inference(model, tensor_parallel=cut, dtype=torch.float32).module
    if kind == "ours":
        from parallelformers_ng import parallelize

        model = parallelize(model, int(os.environ["RANKS"]), workers={"device": "cpu"})
    return model


def load_tensor_parallel(directory: str) -> Any:
    """Return a model with random weights, sharded by tensor_parallel. Weights are not tied, because tensor_parallel
    fails with sharded tied weights. Its old transformers derives the head size from the hidden size."""
    import tensor_parallel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(directory)
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return tensor_parallel.tensor_parallel(model, ["cpu"] * int(os.environ["RANKS"]))


def decode(model: Any, prompt: int, tokens: int) -> dict[str, Any]:
    """Measure greedy decoding after a prompt of `prompt` tokens, without the time of the prefill."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.arange(3, 3 + prompt)[None]
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    middle = time.perf_counter()
    output = model.generate(ids, max_new_tokens=tokens + 1, **options)
    end = time.perf_counter()
    return {"tokens_per_second": tokens / (end - 2 * middle + start), "tokens": output[0, prompt:].tolist()}


def prefill(model: Any, prompt: int) -> dict[str, Any]:
    """Measure `generate` of one token: the prefill and the choice of the first token."""
    start = time.perf_counter()
    model.generate(torch.arange(3, 3 + prompt)[None], max_new_tokens=1, do_sample=False, pad_token_id=0)
    return {"tokens_per_second": prompt / (time.perf_counter() - start)}


def bandwidth(nbytes: int, start: float, seconds: float) -> dict[str, Any]:
    """Measure bytes per second that this process reads while it sums a tensor far larger than any cache.

    Args:
        nbytes: bytes of the tensor.
        start: start time on the clock of `time.monotonic`, in seconds. Give several processes the same start, because
            one process alone gets more bandwidth of the RAM.
        seconds: duration in seconds.
    """
    data = _ones(nbytes)
    data.sum()
    time.sleep(max(0.0, start - time.monotonic()))
    passes, begin = 0, time.monotonic()
    while (taken := time.monotonic() - begin) < seconds:
        data.sum()
        passes += 1
    return {"bytes_per_second": passes * data.nbytes / taken}


@functools.cache
def _ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    kind, directory = sys.argv[1:]
    tasks = {"decode": decode, "prefill": prefill}
    if kind == "reader":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        model, tasks = None, {}
    else:
        model = load(kind, directory)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        name = task.pop("task")
        result = bandwidth(**task) if name == "bandwidth" else tasks[name](model, **task)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
