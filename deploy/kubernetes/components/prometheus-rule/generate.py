#!/usr/bin/env python3
"""Writes prometheus-rule.yaml beside it, from deploy/prometheus/rules; with --check it only says whether that is as it
would write it.

usage: deploy/kubernetes/components/prometheus-rule/generate.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[2] / "prometheus/rules/lossd.rules.yml"
MANIFEST = HERE / "prometheus-rule.yaml"
HEAD = """\
# Written by generate.py from deploy/prometheus/rules/lossd.rules.yml: change that, and run it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: lossd
  namespace: lossd
  labels:
    app.kubernetes.io/name: lossd
spec:
"""


def main() -> int:
    rules = RULES.read_text(encoding="utf-8")
    text = HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")
    if "--check" not in sys.argv:
        MANIFEST.write_text(text, encoding="utf-8")
    elif not MANIFEST.exists() or MANIFEST.read_text(encoding="utf-8") != text:
        print(f"not what {Path(__file__).name} writes, so run it: {MANIFEST.name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
