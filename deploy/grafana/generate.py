#!/usr/bin/env python3
"""Writes the dashboards beside it; with --check it only says whether they are as it would write them.

usage: deploy/grafana/generate.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import device
import head
import overview

FOLDER = Path(__file__).parent / "dashboards"


def main() -> int:
    stale = []
    for dashboard in (overview.DASHBOARD, head.DASHBOARD, device.DASHBOARD):
        path = FOLDER / f"{dashboard['uid']}.json"
        text = json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(f"not what deploy/grafana/generate.py writes, so run it: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
