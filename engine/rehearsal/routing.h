// Whom the router would choose, drawn instead: uniformly, or so that nodes of a tree share experts with their parents.
#pragma once

#include <cstdint>
#include <span>

namespace kdt {

struct RoutingDraw {
  int64_t n_layers;              // with experts
  int64_t n_experts, k;
  double overlap;                // a node has each of its parent's experts with this probability; the others are drawn uniformly
  uint32_t seed;
};

// `parent`: of every row, an earlier row or -1. out [n_layers][stride], of which each layer gets [rows, k]: distinct experts a row. A
// function of the arguments alone.
void draw_experts(const RoutingDraw& draw, std::span<const int32_t> parent, int64_t stride, int32_t* out);

}  // namespace kdt
