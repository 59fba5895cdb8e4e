"""Messages between the processes, and how they travel."""
