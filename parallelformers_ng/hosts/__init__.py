"""Starts and controls groups whose ranks are on several hosts."""
