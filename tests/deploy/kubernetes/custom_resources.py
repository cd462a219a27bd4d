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
                    "items": fields(
                        ["sourceLabels", "targetLabel"],
                        sourceLabels={"type": "array", "items": STRING},
                        targetLabel=STRING,
                    ),
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

SCHEMAS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("cert-manager.io/v1", "Issuer"): ISSUER,
    ("cert-manager.io/v1", "Certificate"): CERTIFICATE,
}
