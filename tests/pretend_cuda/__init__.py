"""Pretends CUDA devices on machines without CUDA devices.

Tensors of this package claim to be on `cuda:N`, but are in host memory. Operators accept such tensors together with
host tensors only if CUDA does: in copies, and in a few other cases. Copies between host and device and waits of the
host are counted. NCCL is gloo under another name. So the whole code path of a CUDA worker runs without a GPU, and most
of its faults are detected.

The stand-in follows `contract.py`: the promises of torch's and NCCL's sources for each name that the package uses. So
it detects faults that a device hides: use of freed memory, also by graphs; missing waits between streams; copies that
are read too early. `misuse.py` causes each of these faults.

The stand-in cannot show that code runs on a GPU, how fast it runs, or which order of kernels a device chooses.

- `guard.py`: the one part that is compiled.
- `tensor.py`: the tensors, and the rules by which they combine.
- `contract.py`: the promise for each name, and its source.
- `memory.py`, `streams.py`, `graphs.py`: allocations, their order, and captures.
- `ledger.py`: the counts.
- `stubs.py`: the replaced names of `torch.cuda`.
- `process_group.py`: NCCL.
- `worker.py`: a rank on such a device; the target with which a group starts.
- `objects.py`, `faults.py`, `misuse.py`: objects that callers send to such ranks.
- `ray_agent.py`: the agent of a Ray node with such devices.
- `caller.py`: the changes in the process that calls `parallelize`.
"""
