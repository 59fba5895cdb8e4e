"""The ingress process: `EngineClient` over a tokenizer actor and the engine replicas."""
