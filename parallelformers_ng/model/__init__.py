"""The parallelized model in the caller: its methods, and how calls become requests. `parallelized` is for outside."""
