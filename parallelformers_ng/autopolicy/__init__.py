"""Policies for models without written ones: a search and a proof on a tiny random copy. `select` is the entry point."""
