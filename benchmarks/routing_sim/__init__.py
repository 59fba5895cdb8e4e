"""A fleet of replicas in simulated time."""
