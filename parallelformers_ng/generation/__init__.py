"""What a `generate` needs on both sides: caches and handles for them, processors that come back changed, streams."""
