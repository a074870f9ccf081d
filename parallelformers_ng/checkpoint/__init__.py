"""Weights as files: finding them, reading parts, keeping them in the parent, writing them again."""
