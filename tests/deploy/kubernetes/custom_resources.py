"""Schemas of the custom resources that deploy/kubernetes uses: the fields used there, and no others. Kubernetes' own
schemas know nothing of them, and a misspelt field of theirs would be dropped without a word."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$", "minLength": 2}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: list[str], /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = fields(["name", "namespace"], name=STRING, namespace=STRING, labels=LABELS)
    return fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        ["jobLabel", "selector", "podMetricsEndpoints"],
        jobLabel=STRING,
        selector=fields(["matchLabels"], matchLabels=LABELS),
        podMetricsEndpoints={
            "type": "array",
            "minItems": 1,
            "items": fields(
                ["port", "path"],
                port=STRING,
                path=STRING,
                interval=DURATION,
                scrapeTimeout=DURATION,
                relabelings={
                    "type": "array",
                    "items": {
                        "oneOf": [
                            fields(
                                ["sourceLabels", "targetLabel"],
                                sourceLabels={"type": "array", "items": STRING},
                                targetLabel=STRING,
                            ),
                            fields(
                                ["sourceLabels", "regex", "action"],
                                sourceLabels={"type": "array", "items": STRING},
                                regex=STRING,
                                action={"enum": ["drop", "keep"]},
                            ),
                        ]
                    },
                },
            ),
        },
    ),
)

RULE: Schema = {
    "oneOf": [
        fields(["record", "expr"], record=STRING, expr=STRING, labels=LABELS),
        fields(["alert", "expr"], alert=STRING, expr=STRING, labels=LABELS, annotations=LABELS, **{"for": DURATION}),
    ]
}
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields(
        ["groups"],
        groups={
            "type": "array",
            "minItems": 1,
            "items": fields(["name", "rules"], name=STRING, rules={"type": "array", "minItems": 1, "items": RULE}),
        },
    ),
)

ISSUER = resource(
    "cert-manager.io/v1",
    "Issuer",
    {
        "oneOf": [
            fields(["selfSigned"], selfSigned=fields([])),
            fields(["ca"], ca=fields(["secretName"], secretName=STRING)),
        ]
    },
)

CERTIFICATE = resource(
    "cert-manager.io/v1",
    "Certificate",
    fields(
        ["secretName", "issuerRef"],
        secretName=STRING,
        isCA={"type": "boolean"},
        commonName=STRING,
        dnsNames={"type": "array", "items": STRING},
        duration=DURATION,
        usages={"type": "array", "items": {"enum": ["server auth", "client auth"]}},
        privateKey=fields(
            ["algorithm"],
            algorithm={"enum": ["ECDSA", "RSA", "Ed25519"]},
            size={"type": "integer"},
            rotationPolicy={"enum": ["Always", "Never"]},
        ),
        issuerRef=fields(["name", "kind"], name=STRING, kind={"enum": ["Issuer", "ClusterIssuer"]}),
    ),
)

# Pods and claims in it are looked at as such by themselves (embedded_in).
COUNT: Schema = {"type": "integer", "minimum": 0}
LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    fields(
        ["replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"],
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=fields(
            ["type"],
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=fields([], partition=COUNT, maxUnavailable=COUNT, maxSurge=COUNT),
        ),
        leaderWorkerTemplate=fields(
            ["size", "restartPolicy", "workerTemplate"],
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            workerTemplate=fields(["metadata", "spec"], metadata={"type": "object"}, spec={"type": "object"}),
            volumeClaimTemplates={"type": "array", "minItems": 1, "items": {"type": "object"}},
            persistentVolumeClaimRetentionPolicy=fields(
                ["whenDeleted", "whenScaled"],
                whenDeleted={"enum": ["Retain", "Delete"]},
                whenScaled={"enum": ["Retain", "Delete"]},
            ),
        ),
    ),
)


def embedded_in(manifest: Schema) -> list[Schema]:
    """Objects of Kubernetes' own inside a custom resource, each as one by itself."""
    if manifest["kind"] != "LeaderWorkerSet":
        return []
    template = manifest["spec"]["leaderWorkerTemplate"]
    pods = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "pods"},
        "template": template["workerTemplate"],
    }
    claims = template.get("volumeClaimTemplates", [])
    return [pods, *({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim} for claim in claims)]


SCHEMAS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("cert-manager.io/v1", "Issuer"): ISSUER,
    ("cert-manager.io/v1", "Certificate"): CERTIFICATE,
}
