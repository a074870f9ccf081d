"""Kernels of a decode step on CUDA devices, in Triton.

- `norm_kernel.py`, 2 kernels of a layer: s = x + d, y = norm(s) ⊙ w.
- `rotary_kernel.py`, 1: rotates q and k by their positions; writes k and v to the cache.
- `slot_attention.py`, 2: softmax(q Kᵀ · scale) V, with the keys split among programs.
- `gate_kernel.py`, 1: y = act(g) ⊙ u.
- `byte_product.py` and `nibble_product.py`, 1 for up to three weights: y = x (s ⊙ Q)ᵀ + b.

For few outputs, programs of a product split its inputs. `partial_results.py` says how the next kernel adds their sums.

Each file has a kernel, its launch, and an operator of torch that launches it.
`launch.py` describes a launch. No program of a launch waits for another one of it.

Tests run every kernel in Triton's interpreter and compile it for five kinds of cards. Figures of an H100:
benchmarks/results/gpu.md.
"""
