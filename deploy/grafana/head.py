"""One head, or some: is it learning, where does its window stand, who feeds it, what does it hold."""

from panels import Query, Row, dashboard, graph, stat, thresholds, variable

H = 'instance=~"$instance",head=~"$head"'
NAME = "{{instance}} {{head}}"
RATE = "$__rate_interval"


def rate(metric: str) -> str:
    return f"rate({metric}{{{H}}}[{RATE}])"


NOW = Row(
    "Now",
    [
        stat(
            "Loss", "Mean loss of a valid token of the last batch, in nats", f"avg(lossd_head_loss{{{H}}})", decimals=4
        ),
        stat(
            "Gradient norm",
            "Of dW when a step, a flush or GradientStats last looked",
            f"max(lossd_head_gradient_norm{{{H}}})",
            decimals=4,
        ),
        stat("Tokens/s", "Valid tokens", f"sum({rate('lossd_head_tokens_total')})"),
        stat("Generation", "Of the open window", f"max(lossd_head_generation{{{H}}})", "none"),
        stat(
            "Weight version",
            "0: no weights yet",
            f"max(lossd_head_weight_version{{{H}}})",
            "none",
            limits=thresholds(critical=1, rising=False),
        ),
        stat(
            "Window age",
            "Since the window took its first chunk",
            f"max(lossd_head_window_age_seconds{{{H}}})",
            "s",
            limits=thresholds(1800, 3600),
        ),
        stat(
            "Flush under way for",
            "0: none",
            f"max(lossd_head_flush_age_seconds{{{H}}})",
            "s",
            limits=thresholds(300, 600),
        ),
        stat("Sessions", "Open", f"sum(lossd_head_sessions{{{H}}})"),
    ],
)

TRAINING = Row(
    "Training",
    [
        graph(
            "Mean loss of a token",
            "In nats, from the sums of losses and of tokens; evaluation is what wants losses alone",
            [
                Query(f"{rate('lossd_head_loss_nats_total')} / {rate('lossd_head_loss_tokens_total')}", NAME),
                Query(
                    f"{rate('lossd_head_evaluation_loss_nats_total')} / "
                    f"{rate('lossd_head_evaluation_loss_tokens_total')}",
                    NAME + ", evaluation",
                ),
            ],
            bottom=None,
        ),
        graph("Loss of the last batch", "In nats", [Query(f"lossd_head_loss{{{H}}}", NAME)], bottom=None),
        graph(
            "Gradient norm",
            "When a step, a flush or GradientStats last looked",
            [Query(f"lossd_head_gradient_norm{{{H}}}", NAME)],
            log=True,
        ),
        graph("Tokens", "Valid tokens", [Query(rate("lossd_head_tokens_total"), NAME)], stacked=True),
        graph(
            "Skipped rows",
            "Share of the valid tokens that were sent though all their factors are 0; nothing was computed of them",
            [Query(f"{rate('lossd_head_rows_skipped_total')} / {rate('lossd_head_tokens_total')}", NAME)],
            "percentunit",
            width=24,
            top=1,
        ),
    ],
)

WINDOW = Row(
    "Window",
    [
        graph(
            "Tokens in the window",
            "Falls to zero with every step or flush",
            [Query(f"lossd_head_window_tokens{{{H}}}", NAME)],
            width=8,
        ),
        graph(
            "Age of the window",
            "An hour without a step is an alert",
            [Query(f"lossd_head_window_age_seconds{{{H}}}", NAME)],
            "s",
            width=8,
            limits=thresholds(1800, 3600),
        ),
        graph(
            "Flush under way for",
            "Ten minutes are an alert",
            [Query(f"lossd_head_flush_age_seconds{{{H}}}", NAME)],
            "s",
            width=8,
            limits=thresholds(300, 600),
        ),
        graph(
            "Phase of the window",
            "1 for the phase it is in",
            [Query(f"lossd_head_flush_phase{{{H}}}", NAME + " {{phase}}")],
            width=8,
            top=1,
        ),
        graph(
            "Generation",
            "Each window has one; it grows with steps and commits",
            [Query(f"lossd_head_generation{{{H}}}", NAME)],
            "none",
            width=8,
            bottom=None,
        ),
        graph(
            "Weight version",
            "Grows with steps and writes of weights",
            [Query(f"lossd_head_weight_version{{{H}}}", NAME)],
            "none",
            width=8,
            bottom=None,
        ),
    ],
)

LOAD = Row(
    "Load and memory",
    [
        graph("Sessions", "Open", [Query(f"lossd_head_sessions{{{H}}}", NAME)], width=6),
        graph(
            "Queued chunks", "Accepted and not yet started", [Query(f"lossd_head_queued_chunks{{{H}}}", NAME)], width=6
        ),
        graph(
            "Credit of its sessions",
            "Part of --staging_bytes that they hold",
            [Query(f"lossd_head_staging_reserved_bytes{{{H}}}", NAME)],
            "bytes",
            width=6,
        ),
        graph(
            "Memory by purpose",
            "What the head reserves, wherever it lies",
            [Query(f"sum by (purpose) (lossd_head_memory_reserved_bytes{{{H}}}) > 0", "{{purpose}}")],
            "bytes",
            width=6,
            stacked=True,
        ),
        graph(
            "Rejected chunks",
            "Answered with an error inside their streams; the log and the status page say why",
            [Query(rate("lossd_head_chunks_rejected_total"), NAME)],
            "cps",
            width=24,
        ),
    ],
)

DASHBOARD = dashboard(
    "lossd-head",
    "lossd: head",
    "Heads of lossd: loss, gradient, window, load and memory.",
    [
        variable("instance", "Server", "label_values(lossd_build_info, instance)", multi=True),
        variable("head", "Head", 'label_values(lossd_head_generation{instance=~"$instance"}, head)', multi=True),
    ],
    [NOW, TRAINING, WINDOW, LOAD],
)
