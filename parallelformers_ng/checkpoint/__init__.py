"""Weights as files: where they are found, read in parts, held by the parent and written again."""
