"""Reading quantized matrices of checkpoints, slice by slice."""
