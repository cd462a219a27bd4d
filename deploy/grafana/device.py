"""One server and its device: batches and their stages, memory, steps, flushes and checkpoints, calls, the process."""

from panels import Column, Query, Row, dashboard, graph, heatmap, stat, table, thresholds, variable

I = 'instance="$instance"'
RATE = "$__rate_interval"


def rate(metric: str, by: str = "", labels: str = "") -> str:
    selected = f"rate({metric}{{{labels + ',' if labels else ''}{I}}}[{RATE}])"
    return f"sum by ({by}) ({selected})" if by else f"sum({selected})"


def mean(histogram: str, by: str = "", labels: str = "") -> str:
    return f"{rate(histogram + '_sum', by, labels)} / {rate(histogram + '_count', by, labels)}"


def quantile(share: float, histogram: str, by: str = "") -> str:
    return f"histogram_quantile({share}, {rate(histogram + '_bucket', f'{by}, le' if by else 'le')})"


NOT_OK = rate("lossd_rpcs_total", "code", 'code!="OK"')

NOW = Row(
    "Now",
    [
        stat(
            "Version",
            "And the device",
            f"lossd_build_info{{{I}}}",
            legend="{{version}} on {{device}}",
            text="name",
            graph="none",
        ),
        stat(
            "Running for", "Since the process started", f"time() - process_start_time_seconds{{{I}}}", "s", graph="none"
        ),
        stat("Tokens/s", "Of chunks", rate("lossd_tokens_total")),
        stat("Heads", "There are", f"lossd_heads{{{I}}}"),
        stat("Streams", "Connected lanes", f"lossd_live_streams{{{I}}}"),
        stat(
            "Memory reserved",
            "Share of what may be reserved; of several devices that of the fullest",
            f"max(1 - lossd_memory_free_bytes{{{I}}} / lossd_memory_limit_bytes{{{I}}})",
            "percentunit",
            limits=thresholds(0.9, 0.95),
        ),
        stat("Draining", "1 while it shuts down", f"lossd_draining{{{I}}}", limits=thresholds(1)),
        stat(
            "Certificate expires in",
            "Negative: it has",
            f"(lossd_tls_certificate_expiry_timestamp_seconds{{{I}}} > 0) - time()",
            "s",
            graph="none",
            absent="no TLS",
            limits=thresholds(warning=7 * 86400, critical=6 * 3600, rising=False),
        ),
    ],
)

BATCHES = Row(
    "Batches and chunks",
    [
        graph(
            "Tokens",
            "Valid, and ignored (no loss, no gradient)",
            [Query(rate("lossd_tokens_total", "kind"), "{{kind}}")],
            stacked=True,
            width=8,
        ),
        graph(
            "Chunks by outcome",
            "rejected: something is wrong with it; refused: not now; withdrawn: its stream ended first",
            [Query(rate("lossd_chunks_total", "outcome"), "{{outcome}}")],
            "cps",
            width=8,
        ),
        graph(
            "Payload",
            "Tensor bytes on the wire",
            [Query(rate("lossd_payload_bytes_total", "direction"), "{{direction}}")],
            "Bps",
            width=8,
        ),
        heatmap(
            "Tokens of a batch",
            "Larger batches read and write dW less often for a token",
            rate("lossd_batch_rows_bucket", "le"),
            "short",
            width=8,
        ),
        graph(
            "Chunks of a batch",
            "Gathered from sessions of one head; 1 on the CPU",
            [Query(mean("lossd_batch_chunks"), "chunks"), Query(rate("lossd_batch_chunks_count"), "batches", "ops")],
            width=8,
        ),
        graph(
            "Rows redone, skipped, held",
            "Redone: their exponent offset was out of range (fp16 heads). Skipped: all their factors are 0. Held, taken, "
            "recomputed: exponentials of batches in two phases. Hidden states: of tokens that phase two need not send",
            [
                Query(rate("lossd_rows_redone_total"), "redone"),
                Query(rate("lossd_rows_skipped_total"), "skipped"),
                Query(rate("lossd_held_rows_total", "outcome"), "{{outcome}}"),
                Query(rate("lossd_held_hidden_states_total", "outcome"), "hidden states {{outcome}}"),
            ],
            "cps",
            width=8,
        ),
        graph(
            "Stages of a chunk, mean",
            "read, queue, forward, weight_gradient, answer",
            [Query(mean("lossd_chunk_seconds", "stage"), "{{stage}}")],
            "s",
            width=8,
        ),
        graph(
            "Stages of a chunk, 99th percentile",
            "As exact as the buckets are wide",
            [Query(quantile(0.99, "lossd_chunk_seconds", "stage"), "{{stage}}")],
            "s",
            width=8,
            log=True,
        ),
        heatmap(
            "Queue",
            "Time from accepted to started",
            rate("lossd_chunk_seconds_bucket", "le", 'stage="queue"'),
            "s",
            width=8,
        ),
        graph(
            "Queued chunks", "Accepted and not yet started", [Query(f"lossd_queued_chunks{{{I}}}", "chunks")], width=8
        ),
        graph(
            "Under way",
            "Bytes read and not yet answered, what sessions may have, and calls that read rows",
            [
                Query(f"lossd_credit_bytes{{{I}}}", "under way"),
                Query(f"lossd_row_stream_bytes{{{I}}}", "rows to be read"),
                Query(f"lossd_row_streams{{{I}}}", "calls that read rows", "short"),
                Query(f"lossd_staging_reserved_bytes{{{I}}}", "promised"),
                Query(f"lossd_staging_limit_bytes{{{I}}}", "limit"),
            ],
            "bytes",
            width=8,
        ),
        graph(
            "Logits",
            "Calls and rows of them, and the time of a call",
            [
                Query(rate("lossd_logits_calls_total"), "calls"),
                Query(rate("lossd_logits_rows_total"), "rows"),
                Query(mean("lossd_logits_seconds"), "time, mean", "s"),
            ],
            "cps",
            width=8,
        ),
        heatmap(
            "Lists of tokens",
            "Ids in the list of each valid token whose softmax is over a list",
            rate("lossd_kept_tokens_bucket", "le"),
            "short",
            width=12,
        ),
        heatmap(
            "Lists of soft targets",
            "Ids in the list of each valid token that has soft targets on a list",
            rate("lossd_target_tokens_bucket", "le"),
            "short",
            width=12,
        ),
    ],
)

MEMORY = Row(
    "Memory",
    [
        graph(
            "The device's",
            "Whoever uses it; on the CPU the host's",
            [Query(f"lossd_device_memory_bytes{{{I}}}", "{{kind}} {{rank}}")],
            "bytes",
            width=8,
        ),
        graph(
            "Reserved, by purpose",
            "On the device, page-locked and of the host; all ranks together",
            [Query(f"sum by (purpose) (lossd_memory_reserved_bytes{{{I}}}) > 0", "{{purpose}}")],
            "bytes",
            width=8,
            stacked=True,
        ),
        graph(
            "Reserved, by place",
            "device, pinned, host",
            [Query(f"sum by (place) (lossd_memory_reserved_bytes{{{I}}})", "{{place}}")],
            "bytes",
            width=8,
            stacked=True,
        ),
        graph(
            "Against the limit",
            "What may be reserved, the most that was, what is left; --head_quota_bytes",
            [
                Query(f"lossd_memory_limit_bytes{{{I}}}", "limit {{rank}}"),
                Query(f"lossd_memory_reserved_peak_bytes{{{I}}}", "peak {{rank}}"),
                Query(f"lossd_memory_free_bytes{{{I}}}", "free {{rank}}"),
                Query(f"lossd_head_quota_bytes{{{I}}}", "quota of a head"),
            ],
            "bytes",
            width=8,
        ),
        graph(
            "Page-locked pool", "0 on the CPU", [Query(f"lossd_pinned_pool_bytes{{{I}}}", "{{kind}}")], "bytes", width=8
        ),
        graph(
            "Parked heads",
            "Heads put aside in the host's memory; coming and going all the time, they have too little room on the device",
            [
                Query(f"lossd_parked_bytes{{{I}}}", "memory"),
                Query(f"lossd_parking_limit_bytes{{{I}}}", "limit"),
                Query(f"lossd_parked_heads{{{I}}}", "heads", "short"),
                Query(rate("lossd_head_parkings_total", "direction"), "{{direction}}", "ops"),
            ],
            "bytes",
            width=8,
        ),
        graph(
            "Regions",
            "Memory shared with clients of this host",
            [
                Query(f"lossd_region_bytes{{{I}}}", "{{kind}}, memory"),
                Query(f"lossd_regions{{{I}}}", "{{kind}}, number", "short"),
            ],
            "bytes",
            width=8,
        ),
    ],
)

STEPS = Row(
    "Steps, flushes, checkpoints",
    [
        graph(
            "Steps",
            "skipped: the gradient was not finite; empty: no token was in the window",
            [Query(rate("lossd_steps_total", "outcome"), "{{outcome}}")],
            "ops",
            width=6,
        ),
        graph(
            "Time of a step",
            "ApplyStep until the next window is open",
            [Query(mean("lossd_step_seconds"), "mean"), Query(quantile(0.99, "lossd_step_seconds"), "p99")],
            "s",
            width=6,
        ),
        graph(
            "Flushes",
            "An abort reopens the window",
            [Query(rate("lossd_flushes_total", "phase"), "{{phase}}")],
            "ops",
            width=6,
        ),
        graph(
            "Time of flushes",
            "freeze, read, commit",
            [Query(mean("lossd_flush_seconds", "phase"), "{{phase}}")],
            "s",
            width=6,
        ),
        graph(
            "Weight versions",
            "By writes and steps",
            [Query(rate("lossd_weight_versions_total"), "versions")],
            "ops",
            width=6,
        ),
        graph(
            "Checkpoints",
            "Drains and starts, too",
            [
                Query(
                    f"sum by (operation, outcome) (increase(lossd_checkpoints_total{{{I}}}[{RATE}]))",
                    "{{operation}} {{outcome}}",
                )
            ],
            width=6,
        ),
        graph(
            "Time of checkpoints",
            "The device waits only while the gradient and weights are copied",
            [
                Query(mean("lossd_checkpoint_seconds", "operation"), "{{operation}}"),
                Query(rate("lossd_checkpoint_bytes_total"), "written", "Bps"),
            ],
            "s",
            width=6,
        ),
        graph(
            "Steps that are not saved",
            "Since each head's newest checkpoint; with --checkpoint_steps they stay below twice of that",
            [
                Query(f"lossd_head_steps_since_checkpoint{{{I}}}", "{{head}}"),
                Query(f"lossd_checkpoint_interval_steps{{{I}}}", "--checkpoint_steps"),
            ],
            width=6,
        ),
        graph(
            "Saves by --checkpoint_steps",
            "Passed over: a save takes longer than the steps between two",
            [
                Query(
                    f"sum by (outcome) (increase(lossd_step_checkpoints_total{{{I}}}[{RATE}]))",
                    "{{outcome}}",
                ),
                Query(f"lossd_step_checkpoint_last_seconds{{{I}}}", "last", "s"),
            ],
            width=6,
        ),
        graph(
            "Age of the last checkpoint",
            "None: nothing was saved since the start",
            [Query(f"time() - (lossd_checkpoint_last_success_timestamp_seconds{{{I}}} > 0)", "age")],
            "s",
            width=6,
            limits=thresholds(3 * 3600, 6 * 3600),
        ),
        graph(
            "Disk of checkpoints",
            "What checkpoints use of it, what is free, and all of it; 0 without --checkpoint_dir",
            [Query(f"lossd_checkpoint_disk_bytes{{{I}}}", "{{kind}}")],
            "bytes",
            width=6,
        ),
    ],
)

CALLS = Row(
    "Calls and access",
    [
        table(
            "Methods",
            "Of the last minutes",
            [
                Column("Calls/s", rate("lossd_rpcs_total", "method"), "reqps", decimals=3),
                Column(
                    "Not OK/s",
                    rate("lossd_rpcs_total", "method", 'code!="OK"'),
                    "reqps",
                    thresholds(0.01, 1),
                    decimals=3,
                ),
                Column("Mean time", mean("lossd_rpc_seconds", "method"), "s"),
                Column("99th percentile", quantile(0.99, "lossd_rpc_seconds", "method"), "s"),
                Column("In flight", f"sum by (method) (lossd_rpcs_in_flight{{{I}}})"),
            ],
            keys={"method": "Method"},
            height=9,
        ),
        graph(
            "Calls by code",
            "Not OK only, those that occur",
            [
                Query(
                    f"{NOT_OK} > 0 or {rate('lossd_rpcs_total')} * 0",
                    "{{code}}",
                )
            ],
            "reqps",
            width=8,
        ),
        graph(
            "Refused, by reason",
            "Chunks and calls; reasons that occur",
            [Query(f"{rate('lossd_rejected_total', 'reason')} > 0 or {rate('lossd_rejected_total')}", "{{reason}}")],
            "cps",
            width=8,
        ),
        graph(
            "Not finite",
            "Hidden states (chunks), losses (tokens), gradient (elements)",
            [Query(rate("lossd_non_finite_total", "kind"), "{{kind}}")],
            "cps",
            width=8,
        ),
        graph(
            "Refused for tokens",
            "no_token, unknown_token, role",
            [Query(rate("lossd_access_denied_total", "reason"), "{{reason}}")],
            "reqps",
            width=12,
        ),
        graph(
            "Certificates and tokens read again",
            "failed: the files are not usable",
            [
                Query(
                    f"sum by (outcome) (increase(lossd_tls_reloads_total{{{I}}}[{RATE}]))", "certificate, {{outcome}}"
                ),
                Query(f"sum by (outcome) (increase(lossd_token_reloads_total{{{I}}}[{RATE}]))", "tokens, {{outcome}}"),
                Query(f"lossd_reload_failing{{{I}}}", "{{files}} cannot be used"),
            ],
            width=12,
        ),
    ],
)

RANKS = Row(
    "Ranks",
    [
        graph(
            "Waiting at exchanges, by rank",
            "Share of time; who waits least is the one that the others wait for. One device has nothing here",
            [Query(rate("lossd_exchange_wait_seconds_sum", "rank"), "{{rank}}")],
            "percentunit",
            width=8,
        ),
        graph(
            "Waiting at exchanges, by what is exchanged",
            "All ranks together; rows: of weights, gradients, state and logits",
            [Query(rate("lossd_exchange_wait_seconds_sum", "exchange"), "{{exchange}}")],
            "percentunit",
            width=8,
        ),
        graph(
            "Oldest command",
            "How long a rank has been at it, and how often all ranks were started again within an hour",
            [
                Query(f"lossd_rank_command_age_seconds{{{I}}}", "{{rank}}"),
                Query(f"changes(lossd_group_epoch{{{I}}}[1h])", "starts", "short"),
                Query(f"lossd_group_ranks{{{I}}}", "ranks", "short"),
            ],
            "s",
            width=8,
        ),
    ],
)

REPLICAS = Row(
    "Replicas",
    [
        graph(
            "Late at the ends of windows, by replica",
            "Share of time that the first one to answer waits for each; replica 0 tells. A server whose heads are its own has nothing here",
            [Query(f"sum by (replica) (instance_replica:lossd_replica_late_seconds:rate5m{{{I}}})", "{{replica}}")],
            "percentunit",
            width=8,
        ),
        graph(
            "Phases of the end of a window",
            "Mean time of this replica in each; and for how long each replica has not answered what it was asked, which replica 0 tells",
            [
                Query(
                    f"rate(lossd_replica_phase_seconds_sum{{{I}}}[{RATE}]) / rate(lossd_replica_phase_seconds_count{{{I}}}[{RATE}])",
                    "{{phase}}",
                ),
                Query(f"lossd_replica_unanswered_seconds{{{I}}}", "{{replica}} has not answered"),
            ],
            "s",
            width=8,
        ),
        graph(
            "The set",
            "1 while all are there; how often they met within an hour, and how often they went back to a checkpoint",
            [
                Query(f"lossd_replica_set_whole{{{I}}}", "whole"),
                Query(f"increase(lossd_replica_epochs_total{{{I}}}[1h])", "met"),
                Query(f"increase(lossd_replica_returns_total{{{I}}}[1h])", "went back"),
                Query(f"sum by (replica) (increase(lossd_replica_sessions_placed_total{{{I}}}[1h]))", "sessions at {{replica}}"),
            ],
            width=8,
        ),
    ],
)

GPU = Row(
    "GPU",
    [
        graph(
            "GPU utilisation",
            "Share of time in which a kernel ran, whoever's; without a GPU there is nothing",
            [Query(f"lossd_gpu_utilization_ratio{{{I}}}", "busy {{rank}}")],
            "percentunit",
            width=8,
        ),
        graph(
            "GPU power",
            "Drawn by the whole GPU",
            [Query(f"lossd_gpu_power_watts{{{I}}}", "power {{rank}}")],
            "watt",
            width=8,
        ),
        graph(
            "GPU temperature",
            "GPUs slow down when they are too hot",
            [Query(f"lossd_gpu_temperature_celsius{{{I}}}", "temperature {{rank}}")],
            "celsius",
            width=8,
        ),
    ],
)

PROCESS = Row(
    "Process",
    [
        graph(
            "Processors",
            "Cores kept busy",
            [Query(f"rate(process_cpu_seconds_total{{{I}}}[{RATE}])", "cores")],
            width=6,
        ),
        graph(
            "Memory",
            "Resident, its peak, and virtual",
            [
                Query(f"process_resident_memory_bytes{{{I}}}", "resident"),
                Query(f"lossd_process_peak_memory_bytes{{{I}}}", "peak {{rank}}"),
                Query(f"process_virtual_memory_bytes{{{I}}}", "virtual"),
            ],
            "bytes",
            width=6,
            log=True,
        ),
        graph(
            "Open files",
            "Each lane is one; connections that find too few left are closed, those that flood the server with calls cut off",
            [
                Query(f"process_open_fds{{{I}}}", "open"),
                Query(f"process_max_fds{{{I}}}", "limit"),
                Query(rate("lossd_connections_refused_total"), "connections closed", "cps"),
                Query(rate("lossd_connections_flooding_total"), "connections cut off", "cps"),
            ],
            width=6,
            log=True,
        ),
        graph(
            "Threads, sessions, log",
            "Threads do not grow with sessions; lines of the log are dropped when nothing reads it",
            [
                Query(f"process_threads{{{I}}}", "threads"),
                Query(f"lossd_sessions{{{I}}}", "sessions"),
                Query(rate("lossd_log_lines_dropped_total"), "lines dropped", "cps"),
            ],
            width=6,
        ),
    ],
)

DASHBOARD = dashboard(
    "lossd-device",
    "lossd: device",
    "One lossd server: batches, memory, steps, checkpoints, calls and the process.",
    [variable("instance", "Server", "label_values(lossd_build_info, instance)", multi=False)],
    [NOW, BATCHES, MEMORY, RANKS, REPLICAS, GPU, STEPS, CALLS, PROCESS],
)
