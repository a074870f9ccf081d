"""Worker processes and groups of them: start, requests, supervision, end. Knows nothing of models."""
