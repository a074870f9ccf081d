"""CUDA devices for machines that have none.

Tensors here say that they are on `cuda:N`, and lie in host memory. They meet tensors of the host as CUDA's do: not at
all, but for copies and for what CUDA allows. Copies between host and device, and what the host waits for, are counted.
NCCL is gloo under another name. So the whole path of a CUDA worker runs, and most of its faults show, without a GPU.

What it cannot show: that anything runs on a GPU, how fast, and what comes of kernels that run while the host goes on.
Here everything is done when the call returns, as under CUDA_LAUNCH_BLOCKING=1.

- `guard.py`: the one part that has to be compiled.
- `tensor.py`: the tensors, and the rules by which they meet.
- `ledger.py`: what is counted.
- `stubs.py`: what of `torch.cuda` is asked.
- `process_group.py`: NCCL.
- `worker.py`: a rank on such a device; a group is started with it as its target.
- `objects.py`, `faults.py`: what callers send to such ranks.
- `ray_agent.py`: the agent of a Ray node that has such devices.
- `caller.py`: what the process that calls `parallelize` has to believe.
"""
