"""What outlives a request: records of responses, and where they are kept."""
