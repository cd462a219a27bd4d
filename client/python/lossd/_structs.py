"""The structs of lossd/c_api.h, field by field."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any, TypeVar

MOST_LANES = 64

Progress = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, c.c_int64)
RowSink = c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_int64, c.c_int64, c.c_void_p, c.c_void_p)
OnFrozen = c.CFUNCTYPE(None, c.c_void_p)


class TraceContext(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("traceparent", c.c_char * 56),
        ("tracestate", c.c_char * 520),
    ]


Trace = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(TraceContext))


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
        ("logit_scale", c.c_float),
        ("softcap", c.c_float),
        ("reserved", c.c_int64),
        ("optimizer", c.POINTER(OptimizerConfig)),
        ("class_weights", c.c_void_p),
    ]


class SessionOptions(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("client_key", c.c_char_p),
        ("rank", c.c_int32),
        ("lanes", c.c_int32),
        ("chunk_bytes", c.c_int64),
        ("deterministic", c.c_int32),
    ]


class DistillationStruct(c.Structure):
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
        ("distillation", c.POINTER(DistillationStruct)),
        ("weight_version", c.c_uint64),
        ("window_token", c.c_int64),
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
        ("first_sequences", c.c_uint64 * MOST_LANES),
    ]


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
    ]


class FlushResultStruct(c.Structure):
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


class GradientStatsStruct(c.Structure):
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


class StepResultStruct(c.Structure):
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


# Which function of the library fills in the defaults of which struct.
INITIALIZERS: dict[type[c.Structure], str] = {
    ClientOptions: "lossd_client_options_init",
    OptimizerConfig: "lossd_optimizer_config_init",
    HeadConfig: "lossd_head_config_init",
    SessionOptions: "lossd_session_options_init",
    DistillationStruct: "lossd_distillation_init",
    Batch: "lossd_batch_init",
    Outputs: "lossd_outputs_init",
    Result: "lossd_result_init",
    FlushOptions: "lossd_flush_options_init",
    FlushResultStruct: "lossd_flush_result_init",
    GradientStatsStruct: "lossd_gradient_stats_init",
    StepOptions: "lossd_step_options_init",
    StepResultStruct: "lossd_step_result_init",
    Logits: "lossd_logits_init",
}

Struct = TypeVar("Struct", bound=c.Structure)
Callback = Callable[..., Any]
