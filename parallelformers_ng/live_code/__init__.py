"""The code that a model runs: which it is, whether a program has changed it, and how changes reach the ranks."""
