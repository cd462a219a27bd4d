"""Who may connect to whom, by the network policies of a namespace, as Kubernetes has it: a pod that no policy selects for a
direction is open in it, else what one of them allows is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field

from manifests import Object, matches, of_kind


@dataclass(frozen=True)
class Pod:
    labels: dict[str, str]
    namespace: str = "lossd"
    namespace_labels: dict[str, str] = field(default_factory=dict)


def _is_peer(peer: Object, pod: Pod) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}, peer
    if "namespaceSelector" in peer:
        labels = {**pod.namespace_labels, "kubernetes.io/metadata.name": pod.namespace}
        if not matches(peer["namespaceSelector"], labels):
            return False
    elif pod.namespace != "lossd":
        return False
    return matches(peer.get("podSelector", {}), pod.labels)


def _has_port(rule: Object, port: int, protocol: str) -> bool:
    return any(p["protocol"] == protocol and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])


def _allowed(objects: tuple[Object, ...], way: str, end: str, pod: Pod, peer: Pod, port: int, protocol: str) -> bool:
    policies = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy")
        if way in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], pod.labels)
    ]
    if pod.namespace != "lossd" or not policies:
        return True
    return any(
        _has_port(rule, port, protocol) and any(_is_peer(other, peer) for other in rule[end])
        for policy in policies
        for rule in policy[way.lower()]
    )


def may_connect(objects: tuple[Object, ...], client: Pod, server: Pod, port: int, protocol: str = "TCP") -> bool:
    return _allowed(objects, "Egress", "to", client, server, port, protocol) and _allowed(
        objects, "Ingress", "from", server, client, port, protocol
    )
