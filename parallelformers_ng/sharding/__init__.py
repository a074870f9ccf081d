"""Shards models: policies give a plan, and parallel layers carry out the plan on each rank."""
