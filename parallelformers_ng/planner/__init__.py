"""What a model would need and give on devices that may not be here."""
