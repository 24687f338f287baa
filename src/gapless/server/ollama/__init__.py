"""Ollama's API, for the clients that are written for it.

The model is loaded as long as the server runs: `keep_alive` and the options of a runner change nothing.
"""
