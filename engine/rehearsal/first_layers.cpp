#include "rehearsal/first_layers.h"

#include <algorithm>

namespace kdt {

ModelConfig first_layers(ModelConfig model, int64_t layers) {
  model.n_layers = std::min(model.n_layers, layers);
  model.n_dense_layers = std::min(model.n_dense_layers, model.n_layers);
  return model;
}

DraftConfig first_layers(DraftConfig draft, int64_t layers) {
  draft.n_target_layers = std::min(draft.n_target_layers, layers);
  std::vector<int64_t>& taps = draft.target_layer_ids;
  for (int64_t& tap : taps) tap = std::min(tap, draft.n_target_layers - 1);
  taps.erase(std::unique(taps.begin(), taps.end()), taps.end());
  return draft;
}

}  // namespace kdt
