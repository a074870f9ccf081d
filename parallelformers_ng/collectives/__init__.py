"""Sums and gathers between ranks: one small protocol, a few backends. `arena` and `connect` are for outside."""
