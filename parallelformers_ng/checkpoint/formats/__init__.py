"""Checkpoints that are quantized already: what their names and numbers mean, library by library."""
