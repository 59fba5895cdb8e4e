"""Starting and stopping a server on this machine: `manta serve` and what it checks beforehand."""
