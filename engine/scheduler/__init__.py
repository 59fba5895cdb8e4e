"""The scheduler: pure, no I/O, no clock of its own. `scheduler.py` is the place to start."""
