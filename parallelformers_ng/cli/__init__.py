"""The command line: `plan`, `verify`, `bench`, `shard`. `commands.main` is for outside."""
