"""Implements the parallelized model in the caller's process: its methods, and how calls become requests."""
