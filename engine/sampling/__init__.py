"""The worker's sampler: state of each slot, penalties, filters, draws and log-probabilities."""
