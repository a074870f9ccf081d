"""Runs the caller's forward hooks on the workers, and copies their changes back to the caller."""
