// A prompt of one stream, chunk by chunk, timed.
#pragma once

#include <cstdint>

#include "checkpoint/config.h"
#include "rehearsal/rehearsal_ops.h"
#include "runtime/round.h"

namespace kdt {

struct PrefillFigures {
  int64_t tokens, chunk;
  double seconds = 0, wall = 0;   // medians, all chunks: on the backend; on the host, to the first token
  double attention = 0;           // seconds of `seconds` in latent attention, W_UK and W_UV with it
  double operations = 0;          // of the arithmetic of the absorbed form: twice the multiplications
};

// `stream`: its pages, and nothing in them. Tokens are the vocabulary's from first_token on. `rank`: of the target.
PrefillFigures measure_prefill(Round& round, RehearsalOps& ops, const ModelConfig& rank, const Stream& stream, int32_t first_token,
                               int64_t tokens, int64_t chunk, int64_t replays);

}  // namespace kdt
