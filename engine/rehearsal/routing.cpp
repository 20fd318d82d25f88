#include "rehearsal/routing.h"

#include <algorithm>

#include "base/philox.h"

namespace kdt {

void draw_experts(const RoutingDraw& draw, std::span<const int32_t> parent, int64_t stride, int32_t* out) {
  for (int64_t layer = 0; layer < draw.n_layers; ++layer) {
    int32_t* of_layer = out + layer * stride;
    for (size_t row = 0; row < parent.size(); ++row) {
      int32_t* chosen = of_layer + static_cast<int64_t>(row) * draw.k;
      const int32_t* above = parent[row] < 0 ? nullptr : of_layer + parent[row] * draw.k;
      uint32_t n_drawn = 0;
      const auto word = [&] {
        return philox_words({static_cast<uint32_t>(layer), static_cast<uint32_t>(row), n_drawn++, 0}, draw.seed, 0).c0;
      };
      int64_t n = 0;
      for (int64_t i = 0; above && i < draw.k; ++i)
        if (word() * 0x1p-32 < draw.overlap) chosen[n++] = above[i];
      while (n < draw.k) {
        const auto expert = static_cast<int32_t>(static_cast<uint64_t>(word()) * static_cast<uint64_t>(draw.n_experts) >> 32);
        if (std::find(chosen, chosen + n, expert) == chosen + n) chosen[n++] = expert;
      }
    }
  }
}

}  // namespace kdt
