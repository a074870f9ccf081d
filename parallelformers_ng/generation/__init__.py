"""Both sides of a `generate`: caches and their handles, processors that come back changed, streams."""
