"""Runs one rank in its process: holds its part of the model, runs calls, and reports memory."""
