"""Reads quantized checkpoints: one module for the tensor names and number formats of each library."""
