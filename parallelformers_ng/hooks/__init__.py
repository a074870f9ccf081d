"""Forward hooks of the caller: registered here, called on the workers by value, their notes brought home."""
