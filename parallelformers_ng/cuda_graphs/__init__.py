"""Decode steps that are compiled, or recorded and played again, and the static caches that these need."""
