"""Infers and proves policies for models without written policies, on a tiny random copy. Call `select`."""
