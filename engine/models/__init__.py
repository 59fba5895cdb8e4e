"""Decoder models over the parallel layers, and reading their checkpoints."""
