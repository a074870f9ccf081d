"""Weights that do not fit where they are computed with: which of them lie elsewhere, and how they come and go."""
