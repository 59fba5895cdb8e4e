"""The size of the KV cache, calculated or measured, and advice if memory is short."""
