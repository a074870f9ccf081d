"""CUDA devices for machines that have none.

Tensors here say that they are on `cuda:N`, and lie in host memory. They meet tensors of the host as CUDA's do: not at
all, but for copies and for what CUDA allows. Copies between host and device, and what the host waits for, are counted.
NCCL is gloo under another name. So the whole path of a CUDA worker runs, and most of its faults show, without a GPU.

It keeps to `contract.py`: the promises of torch's and NCCL's sources for each name that the package uses. So it finds
silent mistakes on a device: memory that is used after it was freed, also by graphs, work of another stream for which
nothing waited, copies that are read before they have come. `misuse.py` does each on purpose.

What it cannot show: that anything runs on a GPU, how fast, and what comes of an order of kernels that streams allow.

- `guard.py`: the one part that has to be compiled.
- `tensor.py`: the tensors, and the rules by which they meet.
- `contract.py`: what is promised for each name, and where the source says so.
- `memory.py`, `streams.py`, `graphs.py`: what is allocated, in which order, and what is captured.
- `ledger.py`: what is counted.
- `stubs.py`: what of `torch.cuda` is asked.
- `process_group.py`: NCCL.
- `worker.py`: a rank on such a device; a group is started with it as its target.
- `objects.py`, `faults.py`, `misuse.py`: what callers send to such ranks.
- `ray_agent.py`: the agent of a Ray node that has such devices.
- `caller.py`: what the process that calls `parallelize` has to believe.
"""
