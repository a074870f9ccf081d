"""Speeds up decode steps: compiles steps or records steps as CUDA graphs, over static caches."""
