"""The device side of the engine: KV cache, batches as device tensors, the model's step."""
