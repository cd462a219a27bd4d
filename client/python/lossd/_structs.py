"""lossd/c_api.h for ctypes. tools/c_api_tables.py writes this file: change the header and run it."""

from __future__ import annotations

import ctypes as c
from typing import Any

LOSSD_C_API_VERSION = 1
LOSSD_MOST_LANES = 64

# lossd_code
LOSSD_OK = 0
LOSSD_CANCELLED = 1
LOSSD_UNKNOWN = 2
LOSSD_INVALID_ARGUMENT = 3
LOSSD_DEADLINE_EXCEEDED = 4
LOSSD_NOT_FOUND = 5
LOSSD_ALREADY_EXISTS = 6
LOSSD_PERMISSION_DENIED = 7
LOSSD_RESOURCE_EXHAUSTED = 8
LOSSD_FAILED_PRECONDITION = 9
LOSSD_ABORTED = 10
LOSSD_OUT_OF_RANGE = 11
LOSSD_UNIMPLEMENTED = 12
LOSSD_INTERNAL = 13
LOSSD_UNAVAILABLE = 14
LOSSD_DATA_LOSS = 15
LOSSD_UNAUTHENTICATED = 16
LOSSD_WINDOW_LOST = 100

# lossd_dtype
LOSSD_FLOAT32 = 0
LOSSD_BFLOAT16 = 1
LOSSD_FLOAT16 = 2

# lossd_region_kind
LOSSD_REGION_SYSTEM = 0
LOSSD_REGION_DEVICE = 1

# lossd_optimizer_kind
LOSSD_OPTIMIZER_NONE = 0
LOSSD_OPTIMIZER_SGD = 1
LOSSD_OPTIMIZER_ADAM = 2
LOSSD_OPTIMIZER_ADAMW = 3

# lossd_mode
LOSSD_LOSS_AND_GRADIENTS = 0
LOSSD_LOSS_ONLY = 1

# lossd_reduction
LOSSD_SUM = 0
LOSSD_MEAN = 1
LOSSD_LATE_MEAN = 2

# lossd_part
LOSSD_OF_HEAD = 0
LOSSD_IGNORE = 1
LOSSD_USE = 2

# lossd_divergence
LOSSD_FORWARD_KL = 0
LOSSD_REVERSE_KL = 1
LOSSD_JENSEN_SHANNON = 2


Progress = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, c.c_int64)


class TraceContext(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("traceparent", c.c_char * 56),
        ("tracestate", c.c_char * 520),
    ]


Trace = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(TraceContext))


Interrupted = c.CFUNCTYPE(c.c_int32, c.c_void_p)


class ClientOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("call_timeout_seconds", c.c_double),
        ("reconnect_timeout_seconds", c.c_double),
        ("transfer_bytes", c.c_int64),
        ("tls", c.c_int32),
        ("tls_ca_certificates", c.c_char_p),
        ("tls_certificate", c.c_char_p),
        ("tls_key", c.c_char_p),
        ("tls_server_name", c.c_char_p),
        ("token_file", c.c_char_p),
        ("token_over_plain_text", c.c_int32),
        ("reserved", c.c_int32),
        ("trace", Trace),
        ("trace_user", c.c_void_p),
        ("interrupted", Interrupted),
        ("interrupted_user", c.c_void_p),
        ("interrupted_thread", c.c_int64),
        ("server_gone", c.POINTER(c.c_char_p)),
    ]


class OptimizerConfig(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("kind", c.c_int32),
        ("nesterov", c.c_int32),
        ("maximize", c.c_int32),
        ("weight_decay", c.c_double),
        ("momentum", c.c_double),
        ("dampening", c.c_double),
        ("beta1", c.c_double),
        ("beta2", c.c_double),
        ("eps", c.c_double),
    ]


class HeadConfig(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("name", c.c_char_p),
        ("vocab_size", c.c_int64),
        ("hidden_size", c.c_int64),
        ("weight_dtype", c.c_int32),
        ("frozen", c.c_int32),
        ("bias", c.c_int32),
        ("master_weights", c.c_int32),
        ("double_buffer", c.c_int32),
        ("fixed_segments", c.c_int32),
        ("logit_scale", c.c_float),
        ("softcap", c.c_float),
        ("optimizer", c.POINTER(OptimizerConfig)),
        ("class_weights", c.c_void_p),
        ("held_bytes", c.c_int64),
    ]


class Logits(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("rows", c.c_int64),
        ("hidden_states", c.c_void_p),
        ("hidden_dtype", c.c_int32),
        ("bias", c.c_int32),
        ("logit_scale", c.c_float),
        ("softcap", c.c_float),
        ("weight_version", c.c_uint64),
        ("logits", c.c_void_p),
        ("dtype", c.c_int32),
        ("top_k", c.c_int32),
        ("top_tokens", c.c_void_p),
        ("top_logits", c.c_void_p),
        ("log_sum_exp", c.c_void_p),
    ]


class SessionOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("client_key", c.c_char_p),
        ("rank", c.c_int32),
        ("lanes", c.c_int32),
        ("chunk_bytes", c.c_int64),
        ("deterministic", c.c_int32),
        ("lanes_at_target", c.c_int32),
        ("held_hidden_bytes", c.c_int64),
    ]


class Distillation(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("teacher", c.c_char_p),
        ("hidden_size", c.c_int64),
        ("hidden_dtype", c.c_int32),
        ("divergence", c.c_int32),
        ("hidden_states", c.c_void_p),
        ("beta", c.c_float),
        ("temperature", c.c_float),
        ("weight", c.c_float),
        ("label_weight", c.c_float),
    ]


class TargetLists(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("offsets", c.c_void_p),
        ("tokens", c.c_void_p),
        ("probabilities", c.c_void_p),
        ("token_count", c.c_int64),
        ("weight", c.c_float),
        ("label_weight", c.c_float),
    ]


class Batch(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("tokens", c.c_int64),
        ("labels", c.c_void_p),
        ("hidden_states", c.c_void_p),
        ("hidden_dtype", c.c_int32),
        ("mode", c.c_int32),
        ("reduction", c.c_int32),
        ("torch_compat", c.c_int32),
        ("ignore_index", c.c_int64),
        ("first_token", c.c_int64),
        ("gradient_scale", c.c_float),
        ("label_smoothing", c.c_float),
        ("lse_square_scale", c.c_float),
        ("logit_scale", c.c_float),
        ("softcap", c.c_float),
        ("z_gradient_scale", c.c_float),
        ("class_weights", c.c_int32),
        ("bias", c.c_int32),
        ("normalizer", c.c_double),
        ("z_normalizer", c.c_double),
        ("token_weights", c.c_void_p),
        ("lse_gradients", c.c_void_p),
        ("distillation", c.POINTER(Distillation)),
        ("weight_version", c.c_uint64),
        ("window_token", c.c_int64),
        ("entropy_gradients", c.c_void_p),
        ("hold", c.c_uint64),
        ("kept_offsets", c.c_void_p),
        ("kept_tokens", c.c_void_p),
        ("kept_token_count", c.c_int64),
        ("target_lists", c.POINTER(TargetLists)),
    ]


class Outputs(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("losses", c.c_void_p),
        ("dx", c.c_void_p),
        ("dx_dtype", c.c_int32),
        ("top_k", c.c_int32),
        ("log_sum_exp", c.c_void_p),
        ("z_losses", c.c_void_p),
        ("log_probabilities", c.c_void_p),
        ("entropies", c.c_void_p),
        ("divergences", c.c_void_p),
        ("predictions", c.c_void_p),
        ("target_ranks", c.c_void_p),
        ("top_tokens", c.c_void_p),
        ("top_log_probabilities", c.c_void_p),
    ]


class Result(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("loss", c.c_double),
        ("loss_sum", c.c_double),
        ("z_loss_sum", c.c_double),
        ("class_weight_sum", c.c_double),
        ("divergence_sum", c.c_double),
        ("valid_tokens", c.c_int64),
        ("correct_tokens", c.c_int64),
        ("weight_version", c.c_uint64),
        ("teacher_weight_version", c.c_uint64),
        ("chunks", c.c_int64),
        ("repeated_chunks", c.c_int64),
        ("lanes", c.c_int64),
        ("first_sequences", c.c_uint64 * 64),
    ]


RowSink = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p, c.c_void_p)


OnFrozen = c.CFUNCTYPE(None, c.c_void_p)


Confirm = c.CFUNCTYPE(c.c_int32, c.c_void_p)


class FlushOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("dtype", c.c_int32),
        ("leave_frozen", c.c_int32),
        ("gradient_scale", c.c_float),
        ("gradient", c.c_void_p),
        ("sink", RowSink),
        ("bias_gradient", c.c_void_p),
        ("progress", Progress),
        ("on_frozen", OnFrozen),
        ("user", c.c_void_p),
        ("confirm", Confirm),
    ]


class FlushResult(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("flush_id", c.c_char * 64),
        ("generation", c.c_uint64),
        ("rows", c.c_int64),
        ("columns", c.c_int64),
        ("norm", c.c_double),
        ("bias_norm", c.c_double),
        ("window_tokens", c.c_uint64),
        ("non_finite", c.c_int64),
    ]


class GradientStats(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("norm", c.c_double),
        ("bias_norm", c.c_double),
        ("largest", c.c_float),
        ("non_finite", c.c_int64),
        ("window_tokens", c.c_uint64),
    ]


class StepOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("learning_rate", c.c_double),
        ("gradient_scale", c.c_double),
        ("skip_non_finite", c.c_int32),
        ("has_generation", c.c_int32),
        ("generation", c.c_uint64),
        ("weight_decay", c.c_double),
        ("momentum", c.c_double),
        ("beta1", c.c_double),
        ("beta2", c.c_double),
    ]


class StepResult(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("generation", c.c_uint64),
        ("weight_version", c.c_uint64),
        ("step", c.c_int64),
        ("skipped", c.c_int32),
        ("reserved", c.c_int32),
        ("norm", c.c_double),
        ("bias_norm", c.c_double),
        ("non_finite", c.c_int64),
        ("window_tokens", c.c_uint64),
    ]


# Which function of the library fills in the defaults of which struct.
INITIALIZERS: dict[type[c.Structure], str] = {
    ClientOptions: "lossd_client_options_init",
    OptimizerConfig: "lossd_optimizer_config_init",
    HeadConfig: "lossd_head_config_init",
    Logits: "lossd_logits_init",
    SessionOptions: "lossd_session_options_init",
    Distillation: "lossd_distillation_init",
    TargetLists: "lossd_target_lists_init",
    Batch: "lossd_batch_init",
    Outputs: "lossd_outputs_init",
    Result: "lossd_result_init",
    FlushOptions: "lossd_flush_options_init",
    FlushResult: "lossd_flush_result_init",
    GradientStats: "lossd_gradient_stats_init",
    StepOptions: "lossd_step_options_init",
    StepResult: "lossd_step_result_init",
}

# The result and the arguments of each function.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "lossd_api_version": (c.c_uint32, []),
    "lossd_version": (c.c_char_p, []),
    "lossd_status_code": (c.c_int32, [c.c_void_p]),
    "lossd_status_message": (c.c_char_p, [c.c_void_p]),
    "lossd_status_flush_id": (c.c_char_p, [c.c_void_p]),
    "lossd_status_free": (None, [c.c_void_p]),
    "lossd_string_free": (None, [c.c_void_p]),
    "lossd_client_options_init": (None, [c.POINTER(ClientOptions), c.c_size_t]),
    "lossd_connect": (c.c_void_p, [c.c_char_p, c.POINTER(ClientOptions), c.POINTER(c.c_void_p)]),
    "lossd_client_free": (None, [c.c_void_p]),
    "lossd_client_status": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_client_memory": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_client_heads": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_client_traffic": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_client_drain": (c.c_void_p, [c.c_void_p]),
    "lossd_client_delete_head": (c.c_void_p, [c.c_void_p, c.c_char_p, c.c_int32]),
    "lossd_client_restore_checkpoint": (c.c_void_p, [c.c_void_p, c.c_char_p, c.c_char_p, c.POINTER(c.c_void_p)]),
    "lossd_client_checkpoints": (c.c_void_p, [c.c_void_p, c.c_char_p, c.POINTER(c.c_void_p)]),
    "lossd_client_delete_checkpoint": (c.c_void_p, [c.c_void_p, c.c_char_p, c.c_char_p, c.POINTER(c.c_void_p)]),
    "lossd_client_create_region": (c.c_void_p, [c.c_void_p, c.c_int32, c.c_int64, c.POINTER(c.c_void_p)]),
    "lossd_region_data": (c.c_void_p, [c.c_void_p]),
    "lossd_region_size": (c.c_int64, [c.c_void_p]),
    "lossd_region_copy_in": (c.c_void_p, [c.c_void_p, c.c_int64, c.c_void_p, c.c_int64]),
    "lossd_region_copy_out": (c.c_void_p, [c.c_void_p, c.c_int64, c.c_void_p, c.c_int64]),
    "lossd_region_free": (None, [c.c_void_p]),
    "lossd_optimizer_config_init": (None, [c.POINTER(OptimizerConfig), c.c_size_t]),
    "lossd_head_config_init": (None, [c.POINTER(HeadConfig), c.c_size_t]),
    "lossd_client_create_head": (c.c_void_p, [c.c_void_p, c.POINTER(HeadConfig), c.POINTER(c.c_void_p)]),
    "lossd_client_get_head": (c.c_void_p, [c.c_void_p, c.c_char_p, c.POINTER(c.c_void_p)]),
    "lossd_head_free": (None, [c.c_void_p]),
    "lossd_head_info": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_head_write_weights": (
        c.c_void_p,
        [c.c_void_p, c.c_int32, c.c_void_p, c.c_void_p, Progress, c.c_void_p, c.c_void_p],
    ),
    "lossd_head_read_weights": (
        c.c_void_p,
        [c.c_void_p, c.c_int64, c.c_int64, c.c_int32, c.c_void_p, c.c_void_p, Progress, c.c_void_p, c.c_void_p],
    ),
    "lossd_head_load_weights": (
        c.c_void_p,
        [c.c_void_p, c.c_char_p, c.c_char_p, c.c_char_p, Progress, c.c_void_p, c.POINTER(c.c_void_p)],
    ),
    "lossd_head_begin_write": (c.c_void_p, [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_void_p)]),
    "lossd_weight_write_rows": (
        c.c_void_p,
        [c.c_void_p, c.c_int64, c.c_int64, c.c_int32, c.c_void_p, c.c_void_p, Progress, c.c_void_p],
    ),
    "lossd_weight_write_commit": (c.c_void_p, [c.c_void_p, c.c_void_p]),
    "lossd_weight_write_free": (None, [c.c_void_p]),
    "lossd_client_copy_head": (
        c.c_void_p,
        [c.c_void_p, c.c_char_p, c.c_char_p, c.c_int32, c.c_int32, c.c_void_p, c.POINTER(c.c_void_p)],
    ),
    "lossd_head_blend": (c.c_void_p, [c.c_void_p, c.c_char_p, c.c_double, c.c_uint64, c.c_uint64, c.c_void_p]),
    "lossd_client_park_head": (c.c_void_p, [c.c_void_p, c.c_char_p, c.POINTER(c.c_void_p)]),
    "lossd_logits_init": (None, [c.POINTER(Logits), c.c_size_t]),
    "lossd_head_logits": (c.c_void_p, [c.c_void_p, c.POINTER(Logits), c.c_void_p]),
    "lossd_head_save_checkpoint": (
        c.c_void_p,
        [c.c_void_p, c.c_char_p, c.POINTER(c.c_char_p), c.c_size_t, c.POINTER(c.c_void_p)],
    ),
    "lossd_session_options_init": (None, [c.POINTER(SessionOptions), c.c_size_t]),
    "lossd_head_open_session": (c.c_void_p, [c.c_void_p, c.POINTER(SessionOptions), c.POINTER(c.c_void_p)]),
    "lossd_session_free": (None, [c.c_void_p]),
    "lossd_session_close": (c.c_void_p, [c.c_void_p]),
    "lossd_session_client_key": (c.c_char_p, [c.c_void_p]),
    "lossd_session_reconnects": (c.c_int64, [c.c_void_p]),
    "lossd_session_held_hidden_bytes": (c.c_int64, [c.c_void_p]),
    "lossd_session_opened_in_window": (c.c_int32, [c.c_void_p]),
    "lossd_session_marks": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_session_lane_places": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "lossd_session_resume_at": (c.c_void_p, [c.c_void_p, c.c_void_p, c.c_size_t]),
    "lossd_distillation_init": (None, [c.POINTER(Distillation), c.c_size_t]),
    "lossd_target_lists_init": (None, [c.POINTER(TargetLists), c.c_size_t]),
    "lossd_batch_init": (None, [c.POINTER(Batch), c.c_size_t]),
    "lossd_outputs_init": (None, [c.POINTER(Outputs), c.c_size_t]),
    "lossd_result_init": (None, [c.POINTER(Result), c.c_size_t]),
    "lossd_session_compute": (c.c_void_p, [c.c_void_p, c.POINTER(Batch), c.POINTER(Outputs), c.POINTER(Result)]),
    "lossd_flush_options_init": (None, [c.POINTER(FlushOptions), c.c_size_t]),
    "lossd_flush_result_init": (None, [c.POINTER(FlushResult), c.c_size_t]),
    "lossd_head_flush": (
        c.c_void_p,
        [c.c_void_p, c.POINTER(FlushOptions), c.POINTER(c.c_char_p), c.c_size_t, c.POINTER(FlushResult)],
    ),
    "lossd_head_discard": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_char_p), c.c_size_t, c.POINTER(FlushResult)]),
    "lossd_head_commit_flush": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    "lossd_head_abort_flush": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    "lossd_gradient_stats_init": (None, [c.POINTER(GradientStats), c.c_size_t]),
    "lossd_head_gradient_stats": (
        c.c_void_p,
        [c.c_void_p, c.POINTER(c.c_char_p), c.c_size_t, c.c_double, c.POINTER(GradientStats)],
    ),
    "lossd_step_options_init": (None, [c.POINTER(StepOptions), c.c_size_t]),
    "lossd_step_result_init": (None, [c.POINTER(StepResult), c.c_size_t]),
    "lossd_head_apply_step": (
        c.c_void_p,
        [c.c_void_p, c.POINTER(StepOptions), c.POINTER(c.c_char_p), c.c_size_t, c.POINTER(StepResult)],
    ),
}
