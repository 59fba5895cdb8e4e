"""Attention over the paged KV cache: one interface, several backends."""
