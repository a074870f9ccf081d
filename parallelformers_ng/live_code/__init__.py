"""Finds the code that a model runs, detects the program's changes to that code, and sends the changes to the ranks."""
