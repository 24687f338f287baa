"""Measures the engine as its users meet it: from the request to the token."""
