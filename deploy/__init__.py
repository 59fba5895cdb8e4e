"""Manta on Ray Serve: ingress, OpenAI protocol, engine replicas, metrics."""
