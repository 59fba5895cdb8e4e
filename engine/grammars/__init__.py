"""Grammars of a model, and the process that tries them."""
