"""An emulator of the parts of Kubernetes and KubeRay that `k8s/` relies on, from Linux namespaces.

It needs root, and Debian's iproute2, nftables, redis-server and nginx. `emulator.py` is the entry.
"""
