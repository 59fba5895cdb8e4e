"""Builds and loads the library of CPU kernels whose sources are in `engine/csrc/`."""
