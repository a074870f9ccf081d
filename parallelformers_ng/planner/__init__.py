"""Forecasts the memory and the decode speed of a model on absent devices."""
