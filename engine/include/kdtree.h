/* kdtree.h: the C ABI of kdtree-engine, and its only public header.
 *
 * Rules that hold for every function
 *   - C11, UTF-8 strings, sizes in elements unless the name says bytes.
 *   - A function that can fail returns kdt_status: KDT_OK or a negative value; kdt_last_error() then has the message of
 *     the calling thread, which reads `<field or file>: <value>: expected <what>`.
 *   - Options structs begin with `struct_size`, set by their `_init` function. A shorter struct of an older client gets
 *     the defaults for what it lacks; a longer one is taken only if its unknown tail is zero.
 *   - Output arrays are the caller's: (pointer, capacity, *n). *n is always the full count; when it exceeds the capacity
 *     nothing is written and KDT_ERR_BUFFER_TOO_SMALL is returned, so a first call with capacity 0 asks for the size.
 *   - Returned `const char *` are borrowed; each says for how long.
 *   - Every create or submit has a destroy that accepts NULL. Handles may be destroyed in any order.
 *   - The library never exits, aborts, prints or installs signal handlers. Functions are thread-safe unless they say
 *     otherwise.
 */
#ifndef KDTREE_H
#define KDTREE_H

#include <stdint.h>

#if defined(__GNUC__)
#define KDT_API __attribute__((visibility("default")))
#else
#define KDT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KDT_ABI_VERSION 3

/* The lines between the cffi marks are parsed by pyclient from the installed header: declarations only, and KDT_API
 * (which pyclient takes off) is the only macro. */
/* cffi:begin */

typedef struct kdt_engine kdt_engine;    /* a loaded model, its drafter, its pages and its decode thread */
typedef struct kdt_request kdt_request;  /* one submitted generation */
typedef struct kdt_reply kdt_reply;      /* an assistant turn being read: reasoning, content, tool calls */

typedef int32_t kdt_status;
enum {
  KDT_OK = 0,
  KDT_ERR_INVALID_ARGUMENT = -1,  /* a setting or an input is out of its range */
  KDT_ERR_BAD_FILE = -2,          /* a file of the checkpoint is malformed or does not fit its config */
  KDT_ERR_IO = -3,                /* a file could not be opened or read */
  KDT_ERR_OUT_OF_MEMORY = -4,
  KDT_ERR_CONTEXT_LENGTH = -5,    /* prompt + max_tokens do not fit the context */
  KDT_ERR_UNSUPPORTED = -6,       /* well-formed, but not implemented by this engine */
  KDT_ERR_CANCELLED = -7,         /* what was waited for was cancelled */
  KDT_ERR_TIMEOUT = -8,           /* nothing happened within the time given; not a failure */
  KDT_ERR_BUFFER_TOO_SMALL = -9,  /* *n has the needed size */
  KDT_ERR_ENGINE_FAILED = -10,    /* the engine hit an error of its own and takes no more requests */
  KDT_ERR_INTERNAL = -11,
  KDT_ERR_QUEUE_FULL = -12,       /* as many requests wait as may; try again later */
  KDT_ERR_SHUTTING_DOWN = -13     /* the engine drains: it finishes what it has and takes nothing new */
};

/* The ABI this library implements (KDT_ABI_VERSION of its header). Clients check it before anything else. */
KDT_API int32_t kdt_abi_version(void);
/* The version of the engine, "0.1.0". Static. */
KDT_API const char *kdt_version(void);
/* The name of a status, "KDT_ERR_IO". Static; never NULL. */
KDT_API const char *kdt_status_name(kdt_status status);
/* The message of this thread's last failed call; "" when there was none. Borrowed until this thread's next call. */
KDT_API const char *kdt_last_error(void);

/* ------------------------------------------------------------------------------------------------ engine */

typedef struct kdt_load_progress kdt_load_progress;   /* how far a kdt_engine_create has come; outlives that call */
KDT_API kdt_status kdt_load_progress_create(kdt_load_progress **out);
/* Bytes of weights loaded so far, and of all; 0 of 0 until files are opened. Any thread. */
KDT_API kdt_status kdt_load_progress_read(const kdt_load_progress *progress, int64_t *done, int64_t *total);
KDT_API void kdt_load_progress_destroy(kdt_load_progress *progress);

typedef struct kdt_engine_options {
  uint32_t struct_size;
  int32_t threads;          /* compute threads, which ranks share, 1 to 256; 0: every CPU there is. Changes no bit of the output */
  const char *model_path;   /* a checkpoint directory; NULL: the bundled model, with its drafter */
  const char *draft_path;   /* a DFlash drafter's directory; NULL: none (or the bundled one, when model_path is NULL) */
  int32_t max_context;      /* tokens of prompt + output of one request; 0: the model's own limit */
  int32_t prefill_chunk;    /* prompt tokens per round, 1 to 4096; 0: 512. Does not change any bit of the output */
  int32_t max_budget;       /* the largest draft tree a request may ask for, 1 to 1024; 0: 1024 */
  const char *chat_format;  /* "auto" or NULL: by the checkpoint's family; "json" or "typescript": how tools are declared */
  const char *cpu_target;   /* NULL: the best instruction set here; else of kdt_cpu_targets(). Engines of one process share it */
  int32_t max_streams;      /* requests decoded together, 1 to 64; 0: 64. Does not change any bit of the output */
  int32_t max_waiting;      /* requests beyond max_streams that are taken and wait, 1 to 65536; 0: 1024 */
  int64_t kv_tokens;        /* tokens the KV pages hold, all streams and the prefix cache together, at least one context;
                               0: a context for every stream, within a quarter of the machine's memory (CUDA: nine tenths of
                               what the weights leave of the device's) */
  int32_t no_prefix_cache;  /* 1: pages are never shared between requests. Does not change any bit of the output */
  int32_t device;           /* of the CUDA backend: its index in kdt_devices_json(); rank r has the r-th from it on, round and round */
  const char *backend;      /* "auto" or NULL: CUDA where `device` is usable, else the CPU; "cpu" or "cuda" */
  int32_t load_direct;      /* 1: shards are read with O_DIRECT, past the page cache: for cold starts. 0: mapped */
  int32_t no_checksums;     /* 1: tensors of shards are not compared with the manifest's checksums */
  kdt_load_progress *load_progress;   /* NULL, or what another thread reads while kdt_engine_create loads */
  int32_t tp;               /* tensor-parallel ranks, 1 to 64; 0: 1, or as many as the launcher started. What does not divide the
                               model is an error. Changes the last bits of logits (docs/numerics.md) */
  int32_t launched;         /* 1: ranks are processes of a launcher (kdt_launched), all with the same options, CPU backend; 0: threads */
  int32_t rank_deadline_ms; /* how long a rank waits for another within a round before it names it and fails; 0: 10000 */
  const char *replay_path;  /* NULL, or the file of a kdt_rehearse elsewhere: rounds count as long as there. CPU backend, one rank */
} kdt_engine_options;

/* Sets struct_size and every default. */
KDT_API kdt_status kdt_engine_options_init(kdt_engine_options *options, uint32_t struct_size);
/* Loads model and drafter, measures round costs and starts the decode thread. The caller owns *out. */
KDT_API kdt_status kdt_engine_create(const kdt_engine_options *options, kdt_engine **out);
/* Cancels what still runs and waits for the decode thread. Requests that outlive it stay readable. NULL is fine. */
KDT_API void kdt_engine_destroy(kdt_engine *engine);
/* Whether a standard launcher (Open MPI's mpirun) started this process as one of several: its rank and how many there are; 0 of
 * 1 when none did. */
KDT_API kdt_status kdt_launched(int32_t *rank, int32_t *n_ranks);
/* Of an engine with `launched` that is not rank 0: takes part in rank 0's rounds until that one is destroyed, and blocks. Every
 * other call of such an engine but info_json and destroy is KDT_ERR_UNSUPPORTED. KDT_ERR_ENGINE_FAILED names the rank that failed.
 * Once an engine. */
KDT_API kdt_status kdt_engine_follow(kdt_engine *engine);
/* What was loaded, as one JSON object: model_path, draft_path, backend, cpu_target, threads, the configs, byte counts,
 * load times, the cost table, `tp` and `ranks`; of a rank other than 0 `rank` and `tp` alone. Borrowed; valid as long as the engine. */
KDT_API const char *kdt_engine_info_json(kdt_engine *engine);
/* The CUDA devices of this machine: {"devices": [{"index", "name", "compute_capability": "9.0", "memory_bytes", "free_bytes",
 * "usable": bool, "reason": null or why not}], "error": null or why there are none}. Borrowed until this thread's next call of it. */
KDT_API const char *kdt_devices_json(void);
/* The space-separated instruction sets the CPU backend can use on this machine, best first. Static. */
KDT_API const char *kdt_cpu_targets(void);

/* Running figures for metrics: names and values, same index, stable order. A name is a Prometheus series without its
 * prefix: `generation_tokens_total`, `request_success_total{finished_reason="stop"}`,
 * `time_to_first_token_seconds_bucket{le="0.5"}`. Borrowed, valid as long as the engine. Safe to call while decoding. */
KDT_API kdt_status kdt_engine_figures(kdt_engine *engine, const char **names, double *values, int64_t capacity, int64_t *n);
enum { KDT_FIGURE_COUNTER = 0, KDT_FIGURE_GAUGE = 1, KDT_FIGURE_HISTOGRAM = 2 };
/* The families of those series: name (without `_bucket`, `_sum`, `_count`), KDT_FIGURE_* and one line of help. Static. */
KDT_API kdt_status kdt_figure_families(const char **names, int32_t *kinds, const char **helps, int64_t capacity, int64_t *n);

typedef struct kdt_health {
  uint32_t struct_size;
  int32_t failed;               /* 1: the engine hit an error of its own, every request ended with it */
  int32_t draining;             /* 1: kdt_engine_drain was called */
  int32_t running;              /* streams that hold pages */
  int32_t waiting;
  double seconds_since_round;   /* since work that is pending last moved on; 0 when nothing is pending */
  const char *error;            /* of a failed engine, else "". Borrowed, valid as long as the engine */
} kdt_health;
/* `health->struct_size` is set by the caller. Never waits for a round. */
KDT_API kdt_status kdt_engine_health(kdt_engine *engine, kdt_health *health);
/* From now on submit and score give KDT_ERR_SHUTTING_DOWN; waits up to timeout_ms (-1: for ever) until no request is left.
 * KDT_ERR_TIMEOUT: some are. May be called again. */
KDT_API kdt_status kdt_engine_drain(kdt_engine *engine, int32_t timeout_ms);
/* Cancels every request, queued or running. */
KDT_API kdt_status kdt_engine_cancel_all(kdt_engine *engine);
/* Forgets every page of the prefix cache that no stream uses; *n_pages, unless NULL, gets how many. Takes effect within one round. */
KDT_API kdt_status kdt_engine_reset_prefix_cache(kdt_engine *engine, int64_t *n_pages);

/* ------------------------------------------------------------------------------------------------ text */

/* Token ids of UTF-8 text. Special-token strings in it are text; no BOS is added. */
KDT_API kdt_status kdt_tokenize(kdt_engine *engine, const char *text, int64_t text_bytes, int32_t *ids, int64_t capacity, int64_t *n);
/* The bytes of token ids (a special token yields its name). Not NUL-terminated, and not always whole UTF-8 characters. */
KDT_API kdt_status kdt_detokenize(kdt_engine *engine, const int32_t *ids, int64_t n_ids, char *bytes, int64_t capacity, int64_t *n);

enum { KDT_THINKING_DEFAULT = -1, KDT_THINKING_OFF = 0, KDT_THINKING_ON = 1 };
/* Token ids of a conversation in the model's chat format, ready to generate the assistant's turn. `messages_json`: an array
 * in OpenAI's form; `tools_json`: NULL or empty, or an array of OpenAI tools; `thinking`: KDT_THINKING_*, whose default is
 * off for the bundled model and on for K2.x checkpoints; `preserve_thinking`: 1 keeps the reasoning of earlier turns.
 * Message text is never parsed for special tokens. */
KDT_API kdt_status kdt_chat_encode(kdt_engine *engine, const char *messages_json, const char *tools_json, int32_t thinking,
                                   int32_t preserve_thinking, int32_t *ids, int64_t capacity, int64_t *n);

/* Reading an assistant turn in the chat format while it streams: what is reasoning, what is content, what calls a tool.
 * Control tokens count only as token ids; text that looks like one is text. */
enum {
  KDT_PART_REASONING = 1,
  KDT_PART_CONTENT = 2,
  KDT_PART_TOOL_BEGIN = 3,      /* a call: `id` and `name` */
  KDT_PART_TOOL_ARGUMENTS = 4   /* a piece of the JSON arguments of the call `tool_index` */
};
typedef struct kdt_part {
  int32_t kind;                 /* KDT_PART_* */
  int32_t tool_index;           /* of a tool part: 0 for the turn's first call, and so on; else -1 */
  const char *text;             /* whole UTF-8 characters; "" of TOOL_BEGIN. Borrowed until the next push, finish or destroy */
  int64_t text_bytes;
  const char *id;               /* of TOOL_BEGIN, as the model wrote it ("functions.search:0"); else "". Borrowed alike */
  const char *name;             /* of TOOL_BEGIN ("search"); else "" */
} kdt_part;
/* `thinking` and `tools`: as the turn was asked for. KDT_THINKING_ON or its default on: the turn starts inside reasoning.
 * `tools` 0: tool markers are dropped and what they enclose is content. The caller owns *out, which may outlive the engine. */
KDT_API kdt_status kdt_reply_create(kdt_engine *engine, int32_t thinking, int32_t tools, kdt_reply **out);
/* One token event: its id and text as kdt_event has them (-1: text alone). Parts are handed out by kdt_reply_parts. One
 * thread at a time per reply. */
KDT_API kdt_status kdt_reply_push(kdt_reply *reply, int32_t token_id, const char *text, int64_t text_bytes);
/* The turn has ended: what was held back becomes parts. */
KDT_API kdt_status kdt_reply_finish(kdt_reply *reply);
/* The parts made by the last push or finish; adjacent text of one kind is one part. */
KDT_API kdt_status kdt_reply_parts(kdt_reply *reply, kdt_part *parts, int64_t capacity, int64_t *n);
KDT_API void kdt_reply_destroy(kdt_reply *reply);

/* ------------------------------------------------------------------------------------------------ generation */

enum { KDT_SPECULATE_AUTO = 0, KDT_SPECULATE_OFF = 1, KDT_SPECULATE_CHAIN = 2, KDT_SPECULATE_TREE = 3 };
/* How the drafter's candidates are ranked at temperature > 0: by log q, or with the sampling noise, which is known
 * before drafting. Either is lossless. AUTO: the one that measured better, docs/speculation.md. */
enum { KDT_RANKING_AUTO = 0, KDT_RANKING_PLAIN = 1, KDT_RANKING_NOISE = 2 };

typedef struct kdt_request_options {
  uint32_t struct_size;
  int32_t max_tokens;       /* tokens to generate, at least 1 (but see prompt_logprobs); prompt + max_tokens must fit the
                               context. Default 128 */
  const int32_t *prompt;    /* token ids, copied by submit */
  int64_t n_prompt;         /* at least 1 */
  double temperature;       /* 0 (default): greedy; at most 100 */
  double top_p;             /* (0, 1], default 1 */
  double min_p;             /* [0, 1], default 0 */
  int32_t top_k;            /* 0 (default): off */
  int32_t has_seed;         /* 0: a random seed is drawn and returned in the result */
  uint64_t seed;
  int32_t speculate;        /* KDT_SPECULATE_*; AUTO without a drafter is OFF; CHAIN and TREE without one are an error */
  int32_t budget;           /* draft nodes without the root, up to the engine's max_budget; 0: 16 for tree, block - 1 for chain,
                               63 for auto, which never uses more. A chain has min(budget, block - 1) */
  int32_t spine;            /* 1: a tree always contains the drafter's top-1 chain, counted inside the budget */
  int32_t ignore_eos;       /* 1: stop ids are ordinary tokens */
  int32_t ranking;          /* KDT_RANKING_* */
  int32_t min_tokens;       /* stop ids and stop strings do not end the text before this many tokens; default 0 */
  double repetition_penalty;   /* (0, 10], default 1: logits of tokens in prompt or output are divided (> 0) or multiplied */
  double presence_penalty;     /* [-2, 2], default 0: taken off the logits of tokens in the output */
  double frequency_penalty;    /* [-2, 2], default 0: that times their count there */
  const int32_t *bias_tokens;  /* [n_bias] token ids, each once; copied */
  const float *bias_values;    /* [n_bias] added to their logits, each in [-100, 100] */
  int64_t n_bias;              /* up to 1024 */
  const char *const *stop;     /* [n_stop] strings that end the text and do not appear in it; copied */
  int64_t n_stop;              /* up to 32, each 1 to 1024 bytes of UTF-8 */
  const int32_t *stop_tokens;  /* [n_stop_tokens] further ids that end the text, ignore_eos or not */
  int64_t n_stop_tokens;       /* up to 256 */
  int32_t logprobs;         /* -1 (default): none; 0 to 20: every token event has its log-probability and this many of the top */
  int32_t prompt_logprobs;  /* -1 (default): none; 0 to 20: the prompt's tokens come first, as PROMPT_TOKEN events. With it
                               max_tokens may be 0 */
  uint32_t choice;          /* which of several answers to one prompt this is: other noise from the same seed */
  int32_t priority;         /* lower is admitted earlier and preempted later; default 0. Equal ones: in the order submitted */
  int32_t timeout_ms;       /* from submit; the request is then cancelled. 0 (default): none */
  int32_t skip_special_tokens;   /* 1: special tokens of the answer have no text; 0 (default): it is their name */
} kdt_request_options;

KDT_API kdt_status kdt_request_options_init(kdt_request_options *options, uint32_t struct_size);
/* Validates, copies and queues a request: KDT_ERR_QUEUE_FULL, KDT_ERR_SHUTTING_DOWN. Up to max_streams run together, admitted
 * by priority and then in the order submitted; none changes any bit of another's output. The caller owns *out. */
KDT_API kdt_status kdt_request_submit(kdt_engine *engine, const kdt_request_options *options, kdt_request **out);

enum { KDT_EVENT_TOKEN = 1, KDT_EVENT_FINISHED = 2, KDT_EVENT_PROMPT_TOKEN = 3 };
typedef struct kdt_event {
  int32_t kind;        /* KDT_EVENT_* */
  int32_t token_id;    /* of a token event, the prompt's included; else -1 */
  const char *text;    /* whole UTF-8 characters that became complete with this event; "" while one is incomplete. Borrowed
                          until the next kdt_request_next of this request, or its destroy; so are the arrays below */
  int64_t text_bytes;
  float logprob;       /* log-probability of the token under the target's own distribution (before temperature, penalties and
                          bias); NaN when it was not asked for, and of the prompt's first token */
  int32_t n_top;       /* of the two arrays */
  const int32_t *top_ids;       /* [n_top] the most probable tokens, best first, ties to the lower id */
  const float *top_logprobs;    /* [n_top] */
} kdt_event;
/* Waits up to timeout_ms (-1: for ever, 0: not at all) for events and hands out up to `capacity` of them, in order. The last
 * one is FINISHED (it carries text that was still held back); after it *n is 0 with KDT_OK. KDT_ERR_TIMEOUT: none yet.
 * One thread at a time per request. */
KDT_API kdt_status kdt_request_next(kdt_request *request, kdt_event *events, int64_t capacity, int64_t *n, int32_t timeout_ms);
/* A descriptor that polls readable while kdt_request_next would not time out (an eventfd; never read from it). Made at the
 * first call, the request's own: closed by its destroy. */
KDT_API kdt_status kdt_request_fd(kdt_request *request, int32_t *fd);
/* Asks the request to stop; it ends with finish reason cancelled within one round, wherever it is. */
KDT_API kdt_status kdt_request_cancel(kdt_request *request);
/* Cancels if need be and frees. NULL is fine. */
KDT_API void kdt_request_destroy(kdt_request *request);

enum { KDT_FINISH_NONE = 0, KDT_FINISH_STOP = 1, KDT_FINISH_LENGTH = 2, KDT_FINISH_CANCELLED = 3, KDT_FINISH_ERROR = 4 };
/* Stages of a round; the order of kdt_result.timings_ms. */
enum { KDT_STAGE_PREFILL = 0, KDT_STAGE_DRAFT = 1, KDT_STAGE_BUILD = 2, KDT_STAGE_VERIFY = 3, KDT_STAGE_SAMPLE = 4,
       KDT_STAGE_ACCEPT = 5, KDT_STAGE_COMMIT = 6, KDT_STAGE_EMIT = 7, KDT_N_STAGES = 8 };

typedef struct kdt_result {
  uint32_t struct_size;
  int32_t finish_reason;        /* KDT_FINISH_*; NONE while it runs */
  int64_t prompt_tokens;
  int64_t generated_tokens;     /* token events handed out or queued */
  int64_t rounds;               /* decode rounds; prefill is none */
  int64_t drafted_rounds;       /* those that verified draft nodes */
  int64_t draft_nodes;          /* draft nodes verified in all */
  double tokens_per_round;      /* committed tokens per round, the bonus token counted, prefill's token not */
  double tokens_per_second;     /* of decoding alone */
  double first_token_ms;        /* from submit */
  uint64_t seed;                /* given or drawn */
  int64_t n_depths;             /* length of accepted_by_depth */
  const int64_t *accepted_by_depth;  /* i-th: rounds that accepted depth i + 1. Borrowed until the request's destroy */
  double timings_ms[8];         /* by KDT_STAGE_* */
  const char *error;            /* when ERROR, or CANCELLED by timeout_ms: the message; else "". Borrowed until the request's destroy */
  int64_t cached_tokens;        /* prompt tokens whose KV came from the prefix cache */
  int64_t preemptions;          /* times its pages were taken and recomputed */
  double queue_ms;              /* from submit until first admitted */
  double total_ms;              /* from submit until it finished, or until now */
  int32_t stop_token;           /* the id that ended the text, or -1 */
  const char *stop_string;      /* the stop string that ended it, or "". Borrowed until the request's destroy */
} kdt_result;
/* `result->struct_size` is set by the caller. Complete once FINISHED was handed out; before that a snapshot. */
KDT_API kdt_status kdt_request_result(kdt_request *request, kdt_result *result);
/* A static name: "stop", "length", "cancelled", "error", "none". */
KDT_API const char *kdt_finish_name(int32_t finish_reason);
/* A static name: "prefill", "draft", … */
KDT_API const char *kdt_stage_name(int32_t stage);

/* The target's logits at every position of `ids`: float32 [n_ids, vocab], row-major. Runs beside
 * the streams and takes part in the queue like a request; blocks. KDT_ERR_CANCELLED by kdt_engine_cancel_all. */
KDT_API kdt_status kdt_engine_score(kdt_engine *engine, const int32_t *ids, int64_t n_ids, float *logits, int64_t capacity, int64_t *n);

/* ------------------------------------------------------------------------------------------------ shards */

/* One INT4 matrix [n_out, n_in] from a checkpoint's form (compressed-tensors pack-quantized, groups of 32) to the GPU's
 * tiles (vLLM's and SGLang's Marlin repack; docs/shard_format.md), and back. `n_words`, n_out * n_in / 8, and `n_scales`,
 * n_out * n_in / 32, are what both arrays of a kind hold. n_out is a multiple of 64, n_in of 32. */
KDT_API kdt_status kdt_int4_to_tiles(const uint32_t *packed, const uint16_t *scales, int64_t n_out, int64_t n_in,
                                     uint32_t *tiles, uint16_t *tile_scales, int64_t n_words, int64_t n_scales);
KDT_API kdt_status kdt_tiles_to_int4(const uint32_t *tiles, const uint16_t *tile_scales, int64_t n_out, int64_t n_in,
                                     uint32_t *packed, uint16_t *scales, int64_t n_words, int64_t n_scales);

typedef struct kdt_sharding kdt_sharding;   /* a checkpoint, opened to be cut into tensor-parallel shards */
/* Opens a checkpoint (and, unless NULL, a drafter) and plans its shards for `tp` ranks. Every tensor is checked by name,
 * dtype and shape. The caller owns *out. */
KDT_API kdt_status kdt_sharding_create(const char *model_path, const char *draft_path, int32_t tp, kdt_sharding **out);
/* What the ranks hold, as one JSON object: `format_version`, `tp`, `tile_layout`, `checksum` (its algorithm), `rank_bytes`,
 * `largest_piece` (bytes), `files` (by rank), `source_files`, and `tensors` in order of use, each with `name`, `dtype`,
 * `shape` (of a rank), `bytes`, `part`, `split`, `transform`, `sources` (`*` stands for each expert) and `pieces`.
 * Borrowed; valid as long as the handle. */
KDT_API const char *kdt_sharding_json(kdt_sharding *sharding);
/* Computes piece `piece` of tensor `tensor` (indices of the JSON) for every rank: `out` has tp pointers to `capacity` bytes,
 * *n gets the bytes written to each. A tensor is its pieces one after the other. Many threads may call this at once. */
KDT_API kdt_status kdt_sharding_make(kdt_sharding *sharding, int64_t tensor, int64_t piece, void *const *out,
                                     int64_t capacity, int64_t *n);
/* Compares pieces that were read back, `bytes` each, with the checkpoint: KDT_ERR_BAD_FILE names the first difference. */
KDT_API kdt_status kdt_sharding_compare(kdt_sharding *sharding, int64_t tensor, int64_t piece, const void *const *made,
                                        int64_t bytes);
KDT_API void kdt_sharding_destroy(kdt_sharding *sharding);

typedef struct kdt_checksum kdt_checksum;   /* XXH64 (seed 0) of bytes that come in pieces. One thread at a time */
KDT_API kdt_status kdt_checksum_create(kdt_checksum **out);
KDT_API kdt_status kdt_checksum_update(kdt_checksum *checksum, const void *bytes, int64_t n_bytes);
/* Of the bytes so far. */
KDT_API kdt_status kdt_checksum_value(kdt_checksum *checksum, uint64_t *value);
KDT_API void kdt_checksum_destroy(kdt_checksum *checksum);

typedef struct kdt_capacity_options {
  uint32_t struct_size;
  int32_t tp;               /* tensor-parallel ranks, one GPU each; default 1 */
  const char *model_path;   /* a directory with config.json; weights need not be there. Or NULL, and: */
  const char *preset;       /* a published config that comes with the engine, "kimi-k2.6", with its drafter */
  const char *draft_path;   /* a drafter's directory; NULL: none, or the preset's */
  int64_t gpu_memory;       /* bytes of one GPU */
  int64_t reserve;          /* bytes of it for everything but weights and KV; default 4 GiB */
  int64_t context;          /* tokens of the stream whose KV a step reads; default 0 */
  double bandwidth;         /* bytes a second that a GPU reads, for times; 0 (default): none */
} kdt_capacity_options;

KDT_API kdt_status kdt_capacity_options_init(kdt_capacity_options *options, uint32_t struct_size);
/* What fits, and the least bytes that a step of 1 to 64 nodes reads, by rank, as one JSON object in UTF-8 (no NUL behind
 * it): `fits`, `weights`, `kv`, `streams`, `steps`, `draft`. No weights are touched. */
KDT_API kdt_status kdt_capacity_json(const kdt_capacity_options *options, char *json, int64_t capacity, int64_t *n);

/* ------------------------------------------------------------------------------------------------ rehearsal */

typedef struct kdt_rehearsal_options {
  uint32_t struct_size;
  int32_t tp;               /* as in kdt_capacity_options, and the next three; weights are never read: they are made up */
  const char *model_path;
  const char *preset;
  const char *draft_path;
  const char *backend;      /* as in kdt_engine_options, and the next three */
  int32_t device;
  int32_t threads;
  const char *cpu_target;
  int32_t rank;             /* which rank's work is done; ranks have equal shapes. Default 0 */
  int32_t layers;           /* only the model's first so many; 0 (default): all */
  int32_t replays;          /* of each measurement, whose median counts: 1 to 1000, default 9 */
  int32_t routed;           /* 1: experts are the router's choice; 0 (default): drawn, anew for every replay */
  double seconds;           /* after loading: no measurement begins after so many; 0 (default): no limit */
  const int32_t *nodes, *prefixes, *streams;   /* steps are measured for every combination of these: nodes of each stream, 1 to 1024, */
                            /*   tokens before them, at least 1, and streams, 1 to 64 */
  const double *overlaps;   /* parts of a node's experts that are its parent's, 0 to 1: those after the first for the first cell alone */
  const int32_t *round_nodes;   /* rounds, with a draft, of so many nodes a stream; none without a drafter */
  const int32_t *op_nodes;  /* every operation of steps of so many nodes, for the first prefix and number of streams */
  int64_t n_nodes, n_prefixes, n_streams, n_overlaps, n_round_nodes, n_op_nodes;   /* 1 to 64 each; of the last two 0 to 64 */
  const int32_t *prompts, *chunks;   /* prefill of prompts of so many tokens, in chunks of so many, 1 to 65536 */
  int64_t n_prompts, n_chunks;       /* 0 to 64 each. Of prefixes and prompts those beyond the context are left out */
  kdt_load_progress *progress;       /* NULL, or what another thread reads: measurements done, and all; 0 of 0 while loading */
  double link_gbps, collective_us;   /* sums over ranks wait for bytes at so many GB/s, and so many us each; 0 (default) GB/s: they do not */
} kdt_rehearsal_options;

KDT_API kdt_status kdt_rehearsal_options_init(kdt_rehearsal_options *options, uint32_t struct_size);
/* Measures one rank with made-up weights. Blocks. *json: one JSON object (docs/rehearsal.md), borrowed until this thread's next call. */
KDT_API kdt_status kdt_rehearse(const kdt_rehearsal_options *options, const char **json);

/* cffi:end */

#ifdef __cplusplus
}
#endif
#endif
