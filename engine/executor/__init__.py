"""How the scheduler's steps reach workers: in this process, or by message."""
