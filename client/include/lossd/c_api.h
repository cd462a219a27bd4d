/* lossd's client as a C library: what lossd/client.h does, for every language that can call C.
 *
 *   lossd_client* client = NULL;
 *   lossd_status* status = lossd_connect("localhost:50051", NULL, &client);
 *   if (status != NULL) { fprintf(stderr, "%s\n", lossd_status_message(status)); lossd_status_free(status); }
 *
 * Errors. Functions that can fail return NULL, or a status that the caller frees with lossd_status_free. What
 * they make is left alone when they fail. Nothing throws, and nothing ends the process.
 *
 * Ownership. What a function makes is the caller's: each kind of handle has a function that frees it, which
 * takes NULL too. Handles hold what they need of each other, so that they may be freed in any order. Text
 * that is returned as char* is freed with lossd_string_free; const char* belongs to its handle. Tensors are
 * row-major, dense, little-endian, owned by the caller, and only read or written during the call that they
 * are passed to; a pointer that is not wanted is NULL.
 *
 * Threads. Clients, heads and weight writes may be used from any thread at the same time; calls of one
 * session wait for each other.
 *
 * Versions. Structs begin with their size, which the ..._init functions fill in together with every default:
 * a library that is newer than its caller takes missing fields for defaults, one that is older refuses
 * (INVALID_ARGUMENT) a struct with fields that it does not know. Values of enums and the order of fields
 * never change.
 */
#ifndef LOSSD_C_API_H_
#define LOSSD_C_API_H_

#include <stddef.h>
#include <stdint.h>
#if defined(__GNUC__)
#define LOSSD_API __attribute__((visibility("default")))
#else
#define LOSSD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* NOLINTBEGIN(modernize-use-using): it is C. */

/* Goes up when functions or fields are added. A program needs a library of at least the number that it was
 * compiled with. */
#define LOSSD_C_API_VERSION 1

LOSSD_API uint32_t lossd_api_version(void);
LOSSD_API const char* lossd_version(void); /* "0.1.0" */

/* --- Errors ------------------------------------------------------------------------------------------ */

/* gRPC's numbers, and one of ours: the gradients since the last flush are gone (lossd::IsWindowLost). */
typedef enum lossd_code {
  LOSSD_OK = 0,
  LOSSD_CANCELLED = 1,
  LOSSD_UNKNOWN = 2,
  LOSSD_INVALID_ARGUMENT = 3,
  LOSSD_DEADLINE_EXCEEDED = 4,
  LOSSD_NOT_FOUND = 5,
  LOSSD_ALREADY_EXISTS = 6,
  LOSSD_PERMISSION_DENIED = 7,
  LOSSD_RESOURCE_EXHAUSTED = 8,
  LOSSD_FAILED_PRECONDITION = 9,
  LOSSD_ABORTED = 10,
  LOSSD_OUT_OF_RANGE = 11,
  LOSSD_UNIMPLEMENTED = 12,
  LOSSD_INTERNAL = 13,
  LOSSD_UNAVAILABLE = 14,
  LOSSD_DATA_LOSS = 15,
  LOSSD_UNAUTHENTICATED = 16,
  LOSSD_WINDOW_LOST = 100
} lossd_code;

typedef struct lossd_status lossd_status; /* NULL: success */
LOSSD_API int32_t lossd_status_code(const lossd_status* status);
LOSSD_API const char* lossd_status_message(const lossd_status* status);  /* "" of NULL */
LOSSD_API const char* lossd_status_flush_id(const lossd_status* status); /* see lossd_head_flush; or "" */
LOSSD_API void lossd_status_free(lossd_status* status);
LOSSD_API void lossd_string_free(char* text);

/* --- Common ------------------------------------------------------------------------------------------ */

typedef enum lossd_dtype { LOSSD_FLOAT32 = 0, LOSSD_BFLOAT16 = 1, LOSSD_FLOAT16 = 2 } lossd_dtype;

/* Called now and then from the thread that made the call. Must not call functions of the same session. */
typedef void (*lossd_progress)(void* user, int64_t done_bytes, int64_t total_bytes);

typedef struct lossd_client lossd_client;
typedef struct lossd_head lossd_head;
typedef struct lossd_session lossd_session;
typedef struct lossd_weight_write lossd_weight_write;
typedef struct lossd_region lossd_region;

/* --- Client ------------------------------------------------------------------------------------------ */

typedef struct lossd_trace_context { /* the headers of W3C's Trace Context */
  size_t struct_size;
  char traceparent[56]; /* "00-<trace id>-<span id>-<flags>"; what is not one is not sent */
  char tracestate[520]; /* up to 512 characters, or "" */
} lossd_trace_context;
/* Fills in `context`, which is empty, or leaves it so. Must not call lossd functions. */
typedef void (*lossd_trace)(void* user, lossd_trace_context* context);
/* Not 0: the call that waits ends with CANCELLED. Must not use the session that waits. */
typedef int32_t (*lossd_interrupted)(void* user);
typedef struct lossd_client_options {
  size_t struct_size;
  double call_timeout_seconds;      /* without an answer: DEADLINE_EXCEEDED (lossd::ClientOptions); 30 */
  double reconnect_timeout_seconds; /* how long a call goes on trying; 60 */
  int64_t transfer_bytes;           /* of one message of weights or gradient rows; 4 MiB */
  /* TLS, with the paths of PEM files (lossd::TlsOptions). 0: plain text. */
  int32_t tls;
  const char* tls_ca_certificates;
  const char* tls_certificate;
  const char* tls_key;
  const char* tls_server_name;
  /* File with the token to show to a server that asks for one (lossd::ClientOptions). */
  const char* token_file;
  int32_t token_over_plain_text;
  int32_t reserved;
  /* Asked before every call (lossd::ClientOptions::trace), for as long as any handle of the client lives. */
  lossd_trace trace; /* NULL: none */
  void* trace_user;
  /* Asked about every 100 ms in the thread of a call that waits, for as long as any handle of the client
   * lives. */
  lossd_interrupted interrupted; /* NULL: none */
  void* interrupted_user;
  int64_t interrupted_thread; /* the only thread, by its gettid(), in which it is asked; 0: all */
  /* Where a text is put, once, when the server is known to be gone: then calls that wait, and later ones, end
   * with UNAVAILABLE and it. NULL: nowhere; *server_gone is NULL before that. */
  const char* const* server_gone;
} lossd_client_options;
LOSSD_API void lossd_client_options_init(lossd_client_options* options, size_t struct_size);
/* `target`: "host:port", "dns:///name:port" or "unix:/path"; of replicas several with commas between them,
 * "host-a:50051,host-b:50051", of which whichever answers is called. `options` may be NULL. Waits until a
 * server answers, up to reconnect_timeout_seconds. */
LOSSD_API lossd_status* lossd_connect(const char* target, const lossd_client_options* options,
                                      lossd_client** client);
LOSSD_API void lossd_client_free(lossd_client* client);

/* What the server tells, as JSON texts with the names of lossd/client.h: ServerStatus, ServerMemory, an array
 * of HeadInfo, Traffic. */
LOSSD_API lossd_status* lossd_client_status(lossd_client* client, char** json);
LOSSD_API lossd_status* lossd_client_memory(lossd_client* client, char** json);
LOSSD_API lossd_status* lossd_client_heads(lossd_client* client, char** json);
LOSSD_API lossd_status* lossd_client_traffic(lossd_client* client, char** json);
LOSSD_API lossd_status* lossd_client_drain(lossd_client* client);
LOSSD_API lossd_status* lossd_client_delete_head(lossd_client* client, const char* name,
                                                 int32_t discard_gradient);
/* CheckpointInfo, an array of them, DeletedCheckpoint as JSON. An empty `head` is all of them; what is to be
 * restored is the newest with an empty `tag`, and `json` may be NULL where something is done. */
LOSSD_API lossd_status* lossd_client_restore_checkpoint(lossd_client* client, const char* head,
                                                        const char* tag, char** json);
LOSSD_API lossd_status* lossd_client_checkpoints(lossd_client* client, const char* head, char** json);
LOSSD_API lossd_status* lossd_client_delete_checkpoint(lossd_client* client, const char* head,
                                                       const char* tag, char** json);

/* --- Regions ----------------------------------------------------------------------------------------- */

typedef enum lossd_region_kind { LOSSD_REGION_SYSTEM = 0, LOSSD_REGION_DEVICE = 1 } lossd_region_kind;

/* Memory that this process and a server on the same host share (lossd::Region). Batches whose hidden states
 * and dx lie in it are not sent. */
LOSSD_API lossd_status* lossd_client_create_region(lossd_client* client, int32_t kind, int64_t bytes,
                                                   lossd_region** region);
LOSSD_API void* lossd_region_data(const lossd_region* region);
LOSSD_API int64_t lossd_region_size(const lossd_region* region);
LOSSD_API lossd_status* lossd_region_copy_in(const lossd_region* region, int64_t offset, const void* host,
                                             int64_t bytes);
LOSSD_API lossd_status* lossd_region_copy_out(const lossd_region* region, int64_t offset, void* host,
                                              int64_t bytes);
LOSSD_API void lossd_region_free(lossd_region* region);

/* --- Heads ------------------------------------------------------------------------------------------- */

typedef enum lossd_optimizer_kind {
  LOSSD_OPTIMIZER_NONE = 0,
  LOSSD_OPTIMIZER_SGD = 1,
  LOSSD_OPTIMIZER_ADAM = 2,
  LOSSD_OPTIMIZER_ADAMW = 3
} lossd_optimizer_kind;

/* torch.optim's SGD, Adam and AdamW, by their names and defaults. A NaN stands for "as by default". */
typedef struct lossd_optimizer_config {
  size_t struct_size;
  int32_t kind;
  int32_t nesterov;
  int32_t maximize;
  double weight_decay; /* NaN: 0, of AdamW 0.01 */
  double momentum;
  double dampening;
  double beta1;
  double beta2;
  double eps;
} lossd_optimizer_config;

typedef struct lossd_head_config {
  size_t struct_size;
  const char* name;
  int64_t vocab_size;
  int64_t hidden_size;
  int32_t weight_dtype; /* LOSSD_BFLOAT16 */
  int32_t frozen;
  int32_t bias;
  int32_t master_weights;
  int32_t double_buffer;
  int32_t fixed_segments; /* results have the same bits on any number of devices (lossd::HeadConfig) */
  float logit_scale;      /* 1 */
  float softcap;          /* 0: none */
  const lossd_optimizer_config* optimizer; /* NULL: none */
  const float* class_weights;              /* [vocab_size], or NULL */
  int64_t held_bytes;                      /* for lossd_batch.hold; at least 0 */
} lossd_head_config;

LOSSD_API void lossd_optimizer_config_init(lossd_optimizer_config* config, size_t struct_size);
LOSSD_API void lossd_head_config_init(lossd_head_config* config, size_t struct_size);

/* Creates the head, or returns it if it is there with the same configuration. */
LOSSD_API lossd_status* lossd_client_create_head(lossd_client* client, const lossd_head_config* config,
                                                 lossd_head** head);
LOSSD_API lossd_status* lossd_client_get_head(lossd_client* client, const char* name, lossd_head** head);
LOSSD_API void lossd_head_free(lossd_head* head);
/* HeadInfo as JSON: configuration, versions, window, marks of its sessions, memory. */
LOSSD_API lossd_status* lossd_head_info(const lossd_head* head, char** json);

/* All rows, [V, H] of `dtype`; `bias` [V] of a head with one, otherwise NULL. */
LOSSD_API lossd_status* lossd_head_write_weights(const lossd_head* head, int32_t dtype, const void* weights,
                                                 const float* bias, lossd_progress progress, void* user,
                                                 uint64_t* weight_version);
/* Rows [first_row, first_row + rows) into `weights` [rows, H] and `bias` [rows]. `*weight_version` is what
 * they must be of, 0 for whatever they are of, and then what they were of. */
LOSSD_API lossd_status* lossd_head_read_weights(const lossd_head* head, int64_t first_row, int64_t rows,
                                                int32_t dtype, void* weights, float* bias,
                                                lossd_progress progress, void* user,
                                                uint64_t* weight_version);
/* From a safetensors file of the server's; `tensor` and `bias_tensor` may be NULL. JSON of LoadedWeights. */
LOSSD_API lossd_status* lossd_head_load_weights(const lossd_head* head, const char* path, const char* tensor,
                                                const char* bias_tensor, lossd_progress progress, void* user,
                                                char** json);

/* A version that several processes write together, each its own rows (lossd/weights.h). */
LOSSD_API lossd_status* lossd_head_begin_write(const lossd_head* head, const char* write_key, int32_t replace,
                                               lossd_weight_write** write);
LOSSD_API lossd_status* lossd_weight_write_rows(const lossd_weight_write* write, int64_t first_row,
                                                int64_t rows, int32_t dtype, const void* weights,
                                                const float* bias, lossd_progress progress, void* user);
LOSSD_API lossd_status* lossd_weight_write_commit(const lossd_weight_write* write, uint64_t* weight_version);
LOSSD_API void lossd_weight_write_free(lossd_weight_write* write);

/* A head that the server makes of another one (lossd/copies.h); with `frozen` of its weights alone, and an
 * fp32 master of 16-bit ones with `master_weights`. `*weight_version` is what the source's weights must be
 * of, 0 for whatever they are of, and then what they were of; it may be NULL. */
LOSSD_API lossd_status* lossd_client_copy_head(lossd_client* client, const char* source, const char* name,
                                               int32_t frozen, int32_t master_weights,
                                               uint64_t* weight_version, lossd_head** copy);
/* weights = decay * weights + (1 - decay) * the source's, at the server: Head::Blend. The versions are what
 * weights must be of, or 0; `*weight_version` is the new one of `head`, unless it is NULL. */
LOSSD_API lossd_status* lossd_head_blend(const lossd_head* head, const char* source, double decay,
                                         uint64_t source_version, uint64_t target_version,
                                         uint64_t* weight_version);

/* Client::ParkHead; the HeadInfo as JSON, unless `json` is NULL. */
LOSSD_API lossd_status* lossd_client_park_head(lossd_client* client, const char* name, char** json);

/* lossd::LogitsBatch and lossd::LogitsOutputs: of each row all logits, or with top_k above 0 the largest
 * ones. A NaN stands for "the head's", as it does in lossd_batch. */
typedef struct lossd_logits {
  size_t struct_size;
  int64_t rows;              /* N */
  const void* hidden_states; /* [N, H] of hidden_dtype */
  int32_t hidden_dtype;
  int32_t bias;            /* lossd_part */
  float logit_scale;       /* NaN: the head's */
  float softcap;           /* NaN: the head's; 0: none */
  uint64_t weight_version; /* what the weights must be of; 0: any */
  void* logits;            /* [N, V] of dtype; NULL with top_k */
  int32_t dtype;
  int32_t top_k;
  int32_t* top_tokens; /* [N, top_k], best first; this and the next two may be NULL */
  float* top_logits;   /* [N, top_k] */
  float* log_sum_exp;  /* [N] */
} lossd_logits;
LOSSD_API void lossd_logits_init(lossd_logits* logits, size_t struct_size);
/* Head::Logits: of one weight version, which goes into `*weight_version` unless that is NULL. */
LOSSD_API lossd_status* lossd_head_logits(const lossd_head* head, const lossd_logits* logits,
                                          uint64_t* weight_version);

/* SavedCheckpoint as JSON, unless `json` is NULL. With `marks` the window must have these and nothing else,
 * or nothing is saved. */
LOSSD_API lossd_status* lossd_head_save_checkpoint(const lossd_head* head, const char* tag,
                                                   const char* const* marks, size_t marks_count, char** json);

/* --- Sessions ---------------------------------------------------------------------------------------- */

typedef struct lossd_session_options {
  size_t struct_size;
  const char* client_key; /* NULL: random */
  int32_t rank;
  int32_t lanes;       /* 0: chosen by size */
  int64_t chunk_bytes; /* 0: chosen by device */
  int32_t deterministic;
  int32_t lanes_at_target;   /* 0: at every rank that the server names (SessionOptions::spread_lanes) */
  int64_t held_hidden_bytes; /* as SessionOptions has it */
} lossd_session_options;
LOSSD_API void lossd_session_options_init(lossd_session_options* options, size_t struct_size);
LOSSD_API lossd_status* lossd_head_open_session(const lossd_head* head, const lossd_session_options* options,
                                                lossd_session** session);
/* The session lives on at the server until lossd_session_close, or until its lease ends. */
LOSSD_API void lossd_session_free(lossd_session* session);
LOSSD_API lossd_status* lossd_session_close(lossd_session* session);
LOSSD_API const char* lossd_session_client_key(const lossd_session* session);
LOSSD_API int64_t lossd_session_reconnects(const lossd_session* session);
/* Session::held_hidden_bytes: what the server has set aside. */
LOSSD_API int64_t lossd_session_held_hidden_bytes(const lossd_session* session);
/* 1 if the window had something already when the session was opened here, that came with its client_key
 * (Session::opened_in_window), or else 0. */
LOSSD_API int32_t lossd_session_opened_in_window(const lossd_session* session);
/* What the server has accepted of the session, as JSON that flushes and steps, of other processes too, take:
 * {"session_id": "...", "lanes": [{"lane": 0, "accepted": 7, "applied": 7}], "incarnation": "...",
 * "restores": 0, "generation": 1} (SessionMarks). */
LOSSD_API lossd_status* lossd_session_marks(const lossd_session* session, char** json);
/* Where each lane is, as JSON: [{"target": "127.0.0.1:50052", "why_not_elsewhere": ""}] (LanePlace). */
LOSSD_API lossd_status* lossd_session_lane_places(const lossd_session* session, char** json);
LOSSD_API lossd_status* lossd_session_resume_at(lossd_session* session, const uint64_t* sequences,
                                                size_t count);

typedef enum lossd_mode { LOSSD_LOSS_AND_GRADIENTS = 0, LOSSD_LOSS_ONLY = 1 } lossd_mode;
typedef enum lossd_reduction { LOSSD_SUM = 0, LOSSD_MEAN = 1, LOSSD_LATE_MEAN = 2 } lossd_reduction;
/* Whether a head's class weights, or its bias, count. */
typedef enum lossd_part { LOSSD_OF_HEAD = 0, LOSSD_IGNORE = 1, LOSSD_USE = 2 } lossd_part;
typedef enum lossd_divergence {
  LOSSD_FORWARD_KL = 0,
  LOSSD_REVERSE_KL = 1,
  LOSSD_JENSEN_SHANNON = 2
} lossd_divergence;

/* lossd::Distillation. */
typedef struct lossd_distillation {
  size_t struct_size;
  const char* teacher;
  int64_t hidden_size;
  int32_t hidden_dtype;
  int32_t divergence;
  const void* hidden_states;
  float beta;
  float temperature;
  float weight;
  float label_weight;
} lossd_distillation;

/* lossd::TargetLists. */
typedef struct lossd_target_lists {
  size_t struct_size;
  const int64_t* offsets;     /* [N + 1] */
  const int32_t* tokens;      /* [token_count] */
  const float* probabilities; /* [token_count] */
  int64_t token_count;
  float weight;       /* 1 */
  float label_weight; /* 0 */
} lossd_target_lists;

/* lossd::Batch. A NaN stands for "not set", one that was computed, too: whoever computes a normalizer, a
 * scale or a softcap makes sure that it is a number. */
typedef struct lossd_batch {
  size_t struct_size;
  int64_t tokens;            /* N */
  const int64_t* labels;     /* [N] */
  const void* hidden_states; /* [N, H] of hidden_dtype */
  int32_t hidden_dtype;
  int32_t mode;
  int32_t reduction;
  int32_t torch_compat;
  int64_t ignore_index; /* -100 */
  int64_t first_token;
  float gradient_scale; /* 1 */
  float label_smoothing;
  float lse_square_scale;
  float logit_scale;      /* NaN: the head's */
  float softcap;          /* NaN: the head's; 0: none */
  float z_gradient_scale; /* NaN: gradient_scale */
  int32_t class_weights;  /* lossd_part */
  int32_t bias;           /* lossd_part */
  double normalizer;      /* NaN: this batch's own */
  double z_normalizer;
  const float* token_weights; /* [N], or NULL */
  const float* lse_gradients; /* [N], or NULL */
  const lossd_distillation* distillation;
  uint64_t weight_version;        /* 0: any */
  int64_t window_token;           /* -1: behind the batch before */
  const float* entropy_gradients; /* [N], or NULL */
  uint64_t hold;                  /* of both phases of a batch (lossd::Batch); 0: none */
  const int64_t* kept_offsets;    /* [N + 1], or NULL: no lists (Batch::kept_tokens) */
  const int32_t* kept_tokens;     /* [kept_token_count] */
  int64_t kept_token_count;
  const lossd_target_lists* target_lists; /* or NULL */
} lossd_batch;

/* lossd::BatchOutputs and lossd::TokenReturns; what is NULL is not wanted. */
typedef struct lossd_outputs {
  size_t struct_size;
  float* losses; /* [N] */
  void* dx;      /* [N, H] of dx_dtype; NULL: it is not even computed */
  int32_t dx_dtype;
  int32_t top_k;
  float* log_sum_exp;
  float* z_losses;
  float* log_probabilities;
  float* entropies;
  float* divergences;
  int32_t* predictions;
  int32_t* target_ranks;
  int32_t* top_tokens;          /* [N, top_k] */
  float* top_log_probabilities; /* [N, top_k] */
} lossd_outputs;

#define LOSSD_MOST_LANES 64

/* lossd::BatchResult. The caller sets struct_size (lossd_result_init). */
typedef struct lossd_result {
  size_t struct_size;
  double loss;
  double loss_sum;
  double z_loss_sum;
  double class_weight_sum;
  double divergence_sum;
  int64_t valid_tokens;
  int64_t correct_tokens;
  uint64_t weight_version;
  uint64_t teacher_weight_version;
  int64_t chunks;
  int64_t repeated_chunks;
  int64_t lanes; /* how many first_sequences there are; 0 if nothing was sent */
  uint64_t first_sequences[LOSSD_MOST_LANES];
} lossd_result;
LOSSD_API void lossd_distillation_init(lossd_distillation* distillation, size_t struct_size);
LOSSD_API void lossd_target_lists_init(lossd_target_lists* target_lists, size_t struct_size);
LOSSD_API void lossd_batch_init(lossd_batch* batch, size_t struct_size);
LOSSD_API void lossd_outputs_init(lossd_outputs* outputs, size_t struct_size);
LOSSD_API void lossd_result_init(lossd_result* result, size_t struct_size);
/* Session::Compute: sends the batch and returns when all that is wanted has arrived. `outputs` and `result`
 * may be NULL. */
LOSSD_API lossd_status* lossd_session_compute(lossd_session* session, const lossd_batch* batch,
                                              const lossd_outputs* outputs, lossd_result* result);

/* --- The gradient window ----------------------------------------------------------------------------- */

/* Rows [first_row, first_row + rows) of dW, [rows, H] of the flush's dtype, and of a head with a bias db
 * [rows], otherwise NULL, in order, each exactly once. Called from the thread that flushes; what it is given
 * is valid during the call. Anything but 0 ends the flush with CANCELLED and leaves the window whole. Whether
 * what it was given is what the server had (DATA_LOSS if not) is known when the flush returns. */
typedef int32_t (*lossd_row_sink)(void* user, int64_t first_row, int64_t rows, const void* gradient,
                                  const float* bias_gradient);
typedef void (*lossd_on_frozen)(void* user);
/* Called once all of dW was taken. 1: the flush goes on to its end; anything else ends it with CANCELLED and
 * leaves the window whole. */
typedef int32_t (*lossd_confirm)(void* user);

typedef struct lossd_flush_options {
  size_t struct_size;
  int32_t dtype;
  int32_t leave_frozen;      /* 1: the caller ends the window (lossd_head_commit_flush, ..._abort_flush) */
  float gradient_scale;      /* 1 */
  void* gradient;            /* [V, H] of dtype; or NULL, and */
  lossd_row_sink sink;       /* is given the rows as they arrive; called with `user` */
  float* bias_gradient;      /* [V] beside `gradient`, of a head with a bias; not beside `sink` */
  lossd_progress progress;   /* or NULL; called with `user` */
  lossd_on_frozen on_frozen; /* or NULL: called with `user` once the window is frozen */
  void* user;
  lossd_confirm confirm; /* or NULL; called with `user` */
} lossd_flush_options;

typedef struct lossd_flush_result {
  size_t struct_size;
  char flush_id[64];
  uint64_t generation;
  int64_t rows;
  int64_t columns;
  double norm;
  double bias_norm;
  uint64_t window_tokens;
  int64_t non_finite;
} lossd_flush_result;
LOSSD_API void lossd_flush_options_init(lossd_flush_options* options, size_t struct_size);
LOSSD_API void lossd_flush_result_init(lossd_flush_result* result, size_t struct_size);
/* Head::Flush. `marks`: texts of lossd_session_marks, of every session that contributed. `result` may be
 * NULL, but not with leave_frozen, which takes its flush_id to end. After an error `gradient`, or what the
 * sink was given, holds a part of dW; the window is whole, and reading begins again at the first row. Errors
 * with a lossd_status_flush_id are the two exceptions (lossd::FlushOf); `result` tells their flush, too:
 *
 * LOSSD_UNAVAILABLE, LOSSD_DEADLINE_EXCEEDED and the like: the gradient was read whole, and the commit has no
 * answer. Repeat lossd_head_commit_flush with the flush_id, or this call, or go on: the next flush, discard
 * or step of the same lossd_head begins by repeating the commit.
 *
 * LOSSD_ALREADY_EXISTS, of such a next call: the commit is done now, and what the call before read is the
 * gradient. Nothing was read or dropped of the window behind it; make the call again if it is meant for that
 * one. A discard with the marks of the flush that was committed succeeds instead, and `result` is that flush;
 * a step that names its generation goes on. */
LOSSD_API lossd_status* lossd_head_flush(const lossd_head* head, const lossd_flush_options* options,
                                         const char* const* marks, size_t marks_count,
                                         lossd_flush_result* result);
/* Head::Discard: ends the window without reading it. `marks` as of lossd_head_flush; `result`, which tells of
 * what was dropped, may be NULL. */
LOSSD_API lossd_status* lossd_head_discard(const lossd_head* head, const char* const* marks,
                                           size_t marks_count, lossd_flush_result* result);
LOSSD_API lossd_status* lossd_head_commit_flush(const lossd_head* head, const char* flush_id);
LOSSD_API lossd_status* lossd_head_abort_flush(const lossd_head* head, const char* flush_id);

typedef struct lossd_gradient_stats {
  size_t struct_size;
  double norm;
  double bias_norm;
  float largest;
  int64_t non_finite;
  uint64_t window_tokens;
} lossd_gradient_stats;
LOSSD_API void lossd_gradient_stats_init(lossd_gradient_stats* stats, size_t struct_size);
LOSSD_API lossd_status* lossd_head_gradient_stats(const lossd_head* head, const char* const* marks,
                                                  size_t marks_count, double gradient_scale,
                                                  lossd_gradient_stats* stats);

/* lossd::StepOptions. A NaN stands for "the head's". */
typedef struct lossd_step_options {
  size_t struct_size;
  double learning_rate;
  double gradient_scale; /* 1 */
  int32_t skip_non_finite;
  int32_t has_generation; /* 1: `generation` is the window that the step is to consume; 0: the open one */
  uint64_t generation;
  double weight_decay;
  double momentum;
  double beta1;
  double beta2;
} lossd_step_options;

typedef struct lossd_step_result {
  size_t struct_size;
  uint64_t generation;
  uint64_t weight_version;
  int64_t step;
  int32_t skipped; /* 1: nothing changed, for want of a token in the window or of a finite gradient */
  int32_t reserved;
  double norm;
  double bias_norm;
  int64_t non_finite;
  uint64_t window_tokens;
} lossd_step_result;
LOSSD_API void lossd_step_options_init(lossd_step_options* options, size_t struct_size);
LOSSD_API void lossd_step_result_init(lossd_step_result* result, size_t struct_size);
/* Head::ApplyStep: exactly once. */
LOSSD_API lossd_status* lossd_head_apply_step(const lossd_head* head, const lossd_step_options* options,
                                              const char* const* marks, size_t marks_count,
                                              lossd_step_result* result);

/* NOLINTEND(modernize-use-using) */

#ifdef __cplusplus
}
#endif

#endif /* LOSSD_C_API_H_ */
