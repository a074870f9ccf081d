"""Offloads weights that do not fit on the devices to RAM or disk, and moves each layer to its device for its run."""
