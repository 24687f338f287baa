"""Ollama's API, for the clients that are written for it. What a model needs is loaded when the server starts, so
`keep_alive` and the options of a runner change nothing."""
