"""What a process has and is: memory, cores, signals, logs, the files it brings."""
