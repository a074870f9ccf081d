"""A server for one parallelized model that speaks the OpenAI API, and a page to try it."""
