"""Who may call, and how much: keys, hosts, origins and quotas."""
