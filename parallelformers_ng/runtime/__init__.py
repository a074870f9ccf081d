"""Starts, supervises and ends groups of worker processes, and sends requests to them. Knows nothing of models."""
