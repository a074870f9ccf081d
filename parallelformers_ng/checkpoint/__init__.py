"""Finds checkpoint files, reads parts of tensors, keeps shards in shared memory, and writes checkpoints."""
