"""Structured output: constraints become grammars, and grammars say which tokens may come next.

Masks are computed beside the forward pass, and nothing fails open: a token is sampled under its mask or not
at all. Imported only where a request is constrained: the grammar engine is 10 MB.
"""
