"""The worker's sampler: state of each row, penalties, filters, draws and log-probabilities."""
