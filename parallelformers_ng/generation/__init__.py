"""Supports `generate` on workers: caches and their handles, changed logits processors, and streamed tokens."""
