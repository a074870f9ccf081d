"""Speeds up decode steps: compiles them or records them as CUDA graphs, with the static caches that both need."""
