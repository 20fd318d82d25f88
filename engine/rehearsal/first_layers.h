// Configs cut to fewer layers, for a rehearsal that wants less than the whole model.
#pragma once

#include "checkpoint/config.h"

namespace kdt {

// The first `layers` of a model; of a drafter the taps that are left, the last layer at least.
ModelConfig first_layers(ModelConfig model, int64_t layers);
DraftConfig first_layers(DraftConfig draft, int64_t layers);

}  // namespace kdt
