"""Finds the code that a model runs, detects changes that the program made to it, and sends the changes to the ranks."""
