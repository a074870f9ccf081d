"""Reads quantized checkpoints: the tensor names and number formats of each library."""
