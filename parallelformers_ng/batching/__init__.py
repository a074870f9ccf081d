"""Decodes calls of `generate` from many threads together: the caller has a queue, the ranks have rows of a batch."""
