"""Calls of `generate` from many threads, decoded together: rows of one batch on the ranks, a queue in the caller."""
