"""Forecasts of a model's memory and speed on devices that may not be here."""
