"""What Ray Serve knows and doesn't say: draining, lost replicas, its log."""
