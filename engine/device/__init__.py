"""A GPU's streams, clocks and memory, and page-locked buffers."""
