"""All servers at a glance: is anything wrong, who does how much, where is room. Rates are those of the recording
rules."""

from panels import Column, Query, Row, dashboard, graph, stat, table, thresholds, variable

I = 'instance=~"$instance"'
PER_INSTANCE = "sum without (job) "
UP = [{"type": "value", "options": {"0": {"text": "down", "color": "red"}, "1": {"text": "up", "color": "green"}}}]
DRAINING = [{"type": "value", "options": {"0": {"text": "no"}, "1": {"text": "draining", "color": "yellow"}}}]


def by_instance(expr: str) -> str:
    return f"sum by (instance) ({expr})"


NOW = Row(
    "Now",
    [
        stat(
            "Servers up",
            "Scrape targets of the job lossd that answer",
            f'sum(up{{job="lossd",{I}}})',
            limits=thresholds(critical=1, rising=False),
        ),
        stat(
            "Down",
            "Targets that do not answer",
            f'count(up{{job="lossd",{I}}} == 0) or vector(0)',
            limits=thresholds(critical=1),
        ),
        stat(
            "Alerts firing",
            "lossd's alerts; docs/alerts.md says what to do",
            f'count(ALERTS{{alertstate="firing",alertname=~"Lossd.*",{I}}}) or vector(0)',
            limits=thresholds(warning=1, critical=3),
        ),
        stat("Heads", "On all servers", f"sum(lossd_heads{{{I}}})"),
        stat("Sessions", "Open sessions of trainers", f"sum(lossd_sessions{{{I}}})"),
        stat("Tokens/s", "Tokens of chunks, ignored ones too", f"sum(instance:lossd_tokens:rate5m{{{I}}})"),
        stat("Queued chunks", "Accepted and not yet started", f"sum(lossd_queued_chunks{{{I}}})"),
        stat(
            "Refused/s",
            "Chunks and calls that were refused, for any reason",
            f"sum(instance:lossd_rejected:rate5m{{{I}}})",
            decimals=2,
            limits=thresholds(warning=0.1),
        ),
    ],
)

SERVERS = Row(
    "Servers",
    [
        table(
            "Servers",
            "One line each; the name leads to its device",
            [
                Column("Up", by_instance(f'up{{job="lossd",{I}}}'), mappings=UP),
                Column("Draining", by_instance(f"lossd_draining{{{I}}}"), mappings=DRAINING),
                Column("Heads", by_instance(f"lossd_heads{{{I}}}")),
                Column("Sessions", by_instance(f"lossd_sessions{{{I}}}")),
                Column("Streams", by_instance(f"lossd_live_streams{{{I}}}")),
                Column("Tokens/s", by_instance(f"instance:lossd_tokens:rate5m{{{I}}}")),
                Column(
                    "Memory reserved",
                    f"max by (instance) (instance:lossd_memory_used:ratio{{{I}}})",
                    "percentunit",
                    thresholds(0.9, 0.95),
                    decimals=1,
                ),
                Column(
                    "Staging promised",
                    by_instance(f"instance:lossd_staging_reserved:ratio{{{I}}}"),
                    "percentunit",
                    thresholds(0.8, 0.9),
                    decimals=1,
                ),
                Column("Running for", by_instance(f'time() - process_start_time_seconds{{job="lossd",{I}}}'), "s"),
            ],
            keys={"instance": "Server"},
            links={
                "Server": {
                    "title": "Device",
                    "url": "/d/lossd-device?var-datasource=${datasource}&var-instance=${__value.raw}",
                }
            },
        ),
    ],
)

HEADS = Row(
    "Heads",
    [
        table(
            "Heads",
            "One line each; the name leads to the head",
            [
                Column("Loss", f"sum by (instance, head) (lossd_head_loss{{{I}}})", decimals=4),
                Column("Gradient norm", f"sum by (instance, head) (lossd_head_gradient_norm{{{I}}})", decimals=4),
                Column("Generation", f"sum by (instance, head) (lossd_head_generation{{{I}}})", "none"),
                Column("Weight version", f"sum by (instance, head) (lossd_head_weight_version{{{I}}})", "none"),
                Column("Window tokens", f"sum by (instance, head) (lossd_head_window_tokens{{{I}}})"),
                Column(
                    "Window age",
                    f"sum by (instance, head) (lossd_head_window_age_seconds{{{I}}})",
                    "s",
                    thresholds(1800, 3600),
                ),
                Column("Sessions", f"sum by (instance, head) (lossd_head_sessions{{{I}}})"),
                Column("Memory", f"sum by (instance, head) (lossd_head_memory_reserved_bytes{{{I}}})", "bytes"),
            ],
            keys={"instance": "Server", "head": "Head"},
            links={
                "Head": {
                    "title": "Head",
                    "url": "/d/lossd-head?var-datasource=${datasource}"
                    "&var-instance=${__data.fields.Server}&var-head=${__value.raw}",
                }
            },
        ),
    ],
)

WORK = Row(
    "Work",
    [
        graph(
            "Tokens",
            "Tokens of chunks by server",
            [Query(f"{PER_INSTANCE}(instance:lossd_tokens:rate5m{{{I}}})", "{{instance}}")],
            "short",
            stacked=True,
        ),
        graph(
            "Chunks by outcome",
            "What became of chunks; rejected and refused ones added nothing",
            [Query(f"sum by (outcome) (instance_outcome:lossd_chunks:rate5m{{{I}}})", "{{outcome}}")],
            "cps",
        ),
        graph(
            "Payload",
            "Tensor bytes of chunks and answers, without those in regions",
            [Query(f"sum by (direction) (instance_direction:lossd_payload_bytes:rate5m{{{I}}})", "{{direction}}")],
            "Bps",
        ),
        graph(
            "Mean loss of a token",
            "In nats, over five minutes",
            [
                Query(
                    f"sum by (instance, head) (instance_head:lossd_head_loss_nats_per_token:ratio_rate5m{{{I}}})",
                    "{{instance}} {{head}}",
                )
            ],
            "short",
            bottom=None,
        ),
        graph(
            "Stages of a chunk, mean",
            "Where the time goes, over the chunks of the servers chosen",
            [
                Query(
                    f"sum by (stage) (rate(lossd_chunk_seconds_sum{{{I}}}[$__rate_interval])) "
                    f"/ sum by (stage) (rate(lossd_chunk_seconds_count{{{I}}}[$__rate_interval]))",
                    "{{stage}}",
                )
            ],
            "s",
        ),
        graph(
            "Stages of a chunk, 99th percentile",
            "The worst of the servers chosen",
            [Query(f"max by (stage) (instance_stage:lossd_chunk_seconds:p99_5m{{{I}}})", "{{stage}}")],
            "s",
            log=True,
        ),
    ],
)

ROOM = Row(
    "Queue and room",
    [
        graph(
            "Queued chunks",
            "A queue that only grows is an alert",
            [Query(f"{PER_INSTANCE}(lossd_queued_chunks{{{I}}})", "{{instance}}")],
            width=8,
        ),
        graph(
            "Memory reserved",
            "Share of what may be reserved; of several devices that of the fullest",
            [Query(f"max without (job, rank) (instance:lossd_memory_used:ratio{{{I}}})", "{{instance}}")],
            "percentunit",
            width=8,
            limits=thresholds(0.9, 0.95),
            top=1,
        ),
        graph(
            "Staging promised to sessions",
            "Share of --staging_bytes; at 1 further sessions are told to come back",
            [Query(f"{PER_INSTANCE}(instance:lossd_staging_reserved:ratio{{{I}}})", "{{instance}}")],
            "percentunit",
            width=8,
            limits=thresholds(0.8, 0.9),
            top=1,
        ),
    ],
)

TROUBLE = Row(
    "Trouble",
    [
        graph(
            "Refused, by reason",
            "Reasons that occur",
            [
                Query(
                    f"sum by (reason) (instance_reason:lossd_rejected:rate5m{{{I}}}) > 0 "
                    f"or sum(instance:lossd_rejected:rate5m{{{I}}})",
                    "{{reason}}",
                )
            ],
            "cps",
            width=8,
        ),
        graph(
            "Not finite",
            "Hidden states (chunks), losses (tokens), gradient (elements)",
            [Query(f"sum by (kind) (rate(lossd_non_finite_total{{{I}}}[$__rate_interval]))", "{{kind}}")],
            "cps",
            width=8,
        ),
        graph(
            "Calls that failed",
            "By code; refusals and clients' mistakes as well",
            [Query(f'sum by (code) (instance_method_code:lossd_rpcs:rate5m{{code!="OK",{I}}})', "{{code}}")],
            "reqps",
            width=8,
        ),
        graph(
            "Calls",
            "All methods",
            [Query(f"{PER_INSTANCE}(instance:lossd_rpcs:rate5m{{{I}}})", "{{instance}}")],
            "reqps",
            width=8,
        ),
        graph(
            "Share of calls that failed by the server's fault",
            "UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, DATA_LOSS; an alert from 5 %",
            [Query(f"{PER_INSTANCE}(instance:lossd_rpc_failures_per_rpcs:ratio_rate5m{{{I}}})", "{{instance}}")],
            "percentunit",
            width=8,
            limits=thresholds(0.01, 0.05),
        ),
        graph(
            "Calls refused for their tokens",
            "By reason",
            [Query(f"sum by (reason) (rate(lossd_access_denied_total{{{I}}}[$__rate_interval]))", "{{reason}}")],
            "reqps",
            width=8,
        ),
    ],
)

DASHBOARD = dashboard(
    "lossd-overview",
    "lossd: overview",
    "All lossd servers: state, work, room and trouble. Needs the recording rules of deploy/prometheus/rules.",
    [variable("instance", "Server", "label_values(lossd_build_info, instance)", multi=True)],
    [NOW, SERVERS, HEADS, WORK, ROOM, TROUBLE],
)
