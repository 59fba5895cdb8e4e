"""Other engines to measure against, each in a virtual environment of its own under `.peers/`."""
