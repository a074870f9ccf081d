"""A rank's model in its process, the calls that it takes, the memory that it holds."""
