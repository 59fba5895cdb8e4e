"""Pods' networks: a bridge, a network namespace for each pod, and NetworkPolicy as nftables rules.

Only what `k8s/` uses: selectors by `matchLabels`, numbers as ports, no `ipBlock`. Each pod's rules
are in its own namespace, so they hold for what it sends and for what it gets.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.manifests import Document, matches

NET = "10.244"


def run(*words: str, stdin: str | None = None) -> str:
    """A command's output. Raises `RuntimeError` with what it printed."""
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Interface:
    """A pod on the network: its address, labels and Kubernetes namespace."""

    netns: str
    address: str
    labels: dict[str, str]
    namespace: str
    link: str = field(repr=False, default="")


class Network:
    """A bridge that joins the pods of one emulator."""

    def __init__(self, policies: list[Document], namespace: str) -> None:
        self._policies = policies
        self._namespace = namespace
        self._tag = secrets.token_hex(3)
        self._bridge = f"mb{self._tag}"
        used = run("ip", "-o", "-4", "address")
        self._subnet = next(
            subnet for i in range(1, 255) if f" {(subnet := f'{NET}.{i}')}." not in used
        )
        self._numbers = itertools.count(2)
        self._interfaces: list[Interface] = []
        self.strays: list[str] = []
        """Processes that were still in a pod's network when it was removed, and were killed."""
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "address", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")

    def close(self) -> None:
        """Remove everything that this made."""
        for interface in list(self._interfaces):
            self.remove(interface)
        with suppress(RuntimeError):
            run("ip", "link", "delete", self._bridge)

    def add(self, name: str, labels: dict[str, str], namespace: str) -> Interface:
        """A new network namespace with an address, and rules for every pod that it concerns."""
        number = next(self._numbers)
        netns, address = f"manta-{self._tag}-{name}", f"{self._subnet}.{number}"
        link = f"mv{self._tag}.{number}"
        run("ip", "netns", "add", netns)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", netns)
        run("ip", "link", "set", link, "master", self._bridge, "up")
        run("ip", "-n", netns, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", netns, "link", "set", device, "up")
        run("ip", "-n", netns, "route", "add", "default", "via", f"{self._subnet}.1")
        interface = Interface(netns, address, labels, namespace, link)
        self._interfaces.append(interface)
        self._apply_policies()
        return interface

    def remove(self, interface: Interface) -> None:
        """End a pod's network, and with it its connections."""
        self._interfaces.remove(interface)
        for pid in run("ip", "netns", "pids", interface.netns).split():
            with suppress(OSError):
                self.strays.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
                os.kill(int(pid), signal.SIGKILL)
        with suppress(RuntimeError):
            run("ip", "link", "delete", interface.link)
        with suppress(RuntimeError):
            run("ip", "netns", "delete", interface.netns)
        self._apply_policies()

    def set_link(self, interface: Interface, state: str) -> None:
        """Cut (`down`) or restore (`up`) a pod's network."""
        run("ip", "link", "set", interface.link, state)

    def _apply_policies(self) -> None:
        for interface in self._interfaces:
            rules = self.rules(interface)
            run("ip", "netns", "exec", interface.netns, "nft", "-f", "-", stdin=rules)

    def rules(self, interface: Interface) -> str:
        """The nftables rules of one pod. What no policy selects is open, as in Kubernetes."""
        chains = []
        for direction, hook, peers in (("Ingress", "input", "from"), ("Egress", "output", "to")):
            selecting = [
                policy["spec"]
                for policy in self._policies
                if interface.namespace == self._namespace
                and direction in policy["spec"]["policyTypes"]
                and matches(interface.labels, policy["spec"]["podSelector"])
            ]
            lines = [f"type filter hook {hook} priority 0; policy accept;"]
            if selecting:
                device = "iif" if hook == "input" else "oif"
                lines = [
                    f"type filter hook {hook} priority 0; policy drop;",
                    "ct state established,related accept",
                    f'{device} "lo" accept',
                    "meta l4proto icmp accept",
                ]
                for spec in selecting:
                    for rule in spec.get(direction.lower(), []):
                        lines += self._accept(rule, peers, "saddr" if peers == "from" else "daddr")
            chains.append("\n".join([f"chain {hook} {{", *lines, "}"]))
        table = "table inet policies"
        return "\n".join([table, f"delete {table}", f"{table} {{", *chains, "}", ""])

    def _accept(self, rule: dict[str, Any], peers: str, field_name: str) -> list[str]:
        where = [""]
        if rule.get(peers):
            found = [a for peer in rule[peers] for a in self._addresses(peer)]
            if not found:
                return []
            where = [f"ip {field_name} {{ {', '.join(found)} }} "]
        ports = [
            f"{port.get('protocol', 'TCP').lower()} dport {port['port']} "
            for port in rule.get("ports", [])
        ]
        return [f"{place}{port}accept" for place in where for port in ports or [""]]

    def _addresses(self, peer: dict[str, Any]) -> list[str]:
        everywhere = "namespaceSelector" in peer
        return [
            pod.address
            for pod in self._interfaces
            if (everywhere or pod.namespace == self._namespace)
            and matches(pod.labels, peer.get("podSelector"))
        ]
