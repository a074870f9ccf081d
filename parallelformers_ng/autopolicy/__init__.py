"""Policies for models without written ones: a tiny random twin, a search on it, a proof. `select` is for outside."""
