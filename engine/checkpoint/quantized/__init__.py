"""How checkpoints have quantized matrices in their files. Loads no torch."""
