"""Panels of Grafana as plain dictionaries: what the three dashboards have in common, so that they look alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass
class Query:
    """`legend`: Grafana's template of the series' name. `unit`: if not the panel's; its axis is at the right."""

    expr: str
    legend: str = "__auto"
    unit: str | None = None


@dataclass
class Panel:
    """Without its place; rows() gives it one. Columns of 24, heights in Grafana's units of 30 pixels."""

    body: Json
    width: int
    height: int


@dataclass
class Row:
    title: str
    panels: list[Panel]


def thresholds(warning: float | None = None, critical: float | None = None, rising: bool = True) -> Json:
    """Green, yellow from `warning`, red from `critical`; not rising: red below `critical`, yellow below `warning`."""
    if rising:
        steps = [(None, GREEN), (warning, YELLOW), (critical, RED)]
    else:
        steps = [(None, RED), (critical, YELLOW), (warning, GREEN)]
    kept = [steps[0]] + [step for step in steps[1:] if step[0] is not None]
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for value, color in kept]}


def targets(queries: list[Query], instant: bool, kind: str = "time_series") -> list[Json]:
    return [
        {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "format": kind,
            "instant": instant,
            "legendFormat": query.legend,
            "range": not instant,
            "refId": chr(ord("A") + number),
        }
        for number, query in enumerate(queries)
    ]


def panel(kind: str, title: str, description: str, width: int, height: int, **more: Any) -> Panel:
    return Panel(
        {"type": kind, "title": title, "description": description, "datasource": DATASOURCE, **more}, width, height
    )


def stat(
    title: str,
    description: str,
    expr: str,
    unit: str = "short",
    width: int = 3,
    limits: Json | None = None,
    **options: Any,
) -> Panel:
    """One figure, as it is now, or the text `absent` if there is none; `decimals` gives digits."""
    defaults: Json = {"unit": unit, "color": {"mode": "thresholds"}, "thresholds": limits or thresholds()}
    if "decimals" in options:
        defaults["decimals"] = options["decimals"]
    if "absent" in options:
        defaults["noValue"] = options["absent"]
    return panel(
        "stat",
        title,
        description,
        width,
        4,
        fieldConfig={"defaults": defaults, "overrides": []},
        options={
            "colorMode": "value",
            "graphMode": options.get("graph", "area"),
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": options.get("text", "auto"),
        },
        targets=targets([Query(expr, options.get("legend", "__auto"))], instant=options.get("graph") == "none"),
    )


def graph(
    title: str,
    description: str,
    queries: list[Query],
    unit: str = "short",
    width: int = 12,
    limits: Json | None = None,
    **options: Any,
) -> Panel:
    """Lines over time; `stacked` puts them on one another, `top` and `bottom` bound the axis, `log` is its scale."""
    custom: Json = {
        "drawStyle": "line",
        "fillOpacity": 30 if options.get("stacked") else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if options.get("stacked") else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if options.get("log") else {"type": "linear"},
        "thresholdsStyle": {"mode": "dashed" if limits else "off"},
    }
    defaults: Json = {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "custom": custom,
        "thresholds": limits or thresholds(),
    }
    overrides = [
        {
            "matcher": {"id": "byFrameRefID", "options": target["refId"]},
            "properties": [{"id": "unit", "value": query.unit}, {"id": "custom.axisPlacement", "value": "right"}],
        }
        for query, target in zip(queries, targets(queries, instant=False), strict=True)
        if query.unit
    ]
    if not options.get("log") and options.get("bottom", 0) is not None:
        defaults["min"] = options.get("bottom", 0)
    if "top" in options:
        defaults["max"] = options["top"]
    return panel(
        "timeseries",
        title,
        description,
        width,
        8,
        fieldConfig={"defaults": defaults, "overrides": overrides},
        options={
            "legend": {
                "calcs": ["lastNotNull", "max"],
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        targets=targets(queries, instant=False),
    )


def heatmap(title: str, description: str, expr: str, unit: str, width: int = 12) -> Panel:
    """A histogram over time: `expr` gives the growth of its buckets, by le."""
    return panel(
        "heatmap",
        title,
        description,
        width,
        8,
        fieldConfig={
            "defaults": {
                "custom": {
                    "hideFrom": {"legend": False, "tooltip": False, "viz": False},
                    "scaleDistribution": {"type": "linear"},
                }
            },
            "overrides": [],
        },
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Oranges",
                "scale": "exponential",
                "exponent": 0.5,
                "steps": 64,
                "reverse": False,
            },
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"show": True, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "unit": unit, "reverse": False},
        },
        targets=targets([Query(expr, "{{le}}")], instant=False, kind="heatmap"),
    )


@dataclass
class Column:
    """A column of a table: a query whose values it shows, and how."""

    title: str
    expr: str
    unit: str = "short"
    limits: Json | None = None
    mappings: list[Json] = field(default_factory=list)
    decimals: int | None = None


def table(
    title: str,
    description: str,
    columns: list[Column],
    keys: dict[str, str],
    links: dict[str, Json] | None = None,
    height: int = 7,
) -> Panel:
    """One line for each combination of the labels `keys` (label: heading), which are all that the queries have."""
    overrides: list[Json] = []
    for column in columns:
        properties: list[Json] = [{"id": "unit", "value": column.unit}]
        if column.limits:
            properties += [
                {"id": "thresholds", "value": column.limits},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ]
        if column.mappings:
            properties.append({"id": "mappings", "value": column.mappings})
        if column.decimals is not None:
            properties.append({"id": "decimals", "value": column.decimals})
        overrides.append({"matcher": {"id": "byName", "options": column.title}, "properties": properties})
    for heading, link in (links or {}).items():
        overrides.append(
            {"matcher": {"id": "byName", "options": heading}, "properties": [{"id": "links", "value": [link]}]}
        )
    renamed = {f"Value #{chr(ord('A') + number)}": column.title for number, column in enumerate(columns)}
    return panel(
        "table",
        title,
        description,
        COLUMNS,
        height,
        fieldConfig={
            "defaults": {"custom": {"align": "auto", "filterable": True}, "thresholds": thresholds()},
            "overrides": overrides,
        },
        options={"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}},
        targets=targets([Query(column.expr) for column in columns], instant=True, kind="table"),
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(["Time"], True),
                    "renameByName": renamed | keys,
                    "indexByName": {name: place for place, name in enumerate([*keys, *renamed])},
                },
            },
        ],
    )


def rows(parts: list[Row]) -> list[Json]:
    """The panels of a dashboard, each with its id and place: from left to right, as many as there is room for."""
    placed: list[Json] = []
    y = 0
    for row in parts:
        head: Json = {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "id": len(placed) + 1,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        placed.append(head)
        y += 1
        x = tallest = 0
        for each in row.panels:
            if x + each.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append(
                {**each.body, "id": len(placed) + 1, "gridPos": {"x": x, "y": y, "w": each.width, "h": each.height}}
            )
            x, tallest = x + each.width, max(tallest, each.height)
        y += tallest
    return placed


def variable(name: str, label: str, query: str, multi: bool) -> Json:
    """A list to choose from, filled by label_values."""
    everything: Json = {"selected": True, "text": ["All"], "value": ["$__all"]} if multi else {}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "current": everything,
        "includeAll": multi,
        "allValue": ".+" if multi else None,
        "multi": multi,
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "hide": 0,
        "options": [],
        "skipUrlSync": False,
    }


def dashboard(uid: str, title: str, description: str, variables: list[Json], parts: list[Row]) -> Json:
    source: Json = {
        "type": "datasource",
        "name": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }
    starts: Json = {
        "name": "Starts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "blue",
        "expr": 'process_start_time_seconds{job="lossd",instance=~"$instance"} * 1000',
        "useValueForTime": "on",
        "titleFormat": "lossd started",
        "textFormat": "{{instance}}",
        "step": "60s",
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["lossd"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": [starts]},
        "links": [
            {
                "type": "dashboards",
                "title": "lossd",
                "tags": ["lossd"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": [source, *variables]},
        "panels": rows(parts),
    }
