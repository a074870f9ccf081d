"""The command line `parallelformers-ng`. The entry point is `commands.main`."""
