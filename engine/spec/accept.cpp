#include "spec/accept.h"

namespace kdt::spec {

int64_t accept(int64_t n_nodes, const int32_t* token, const int32_t* parent, const int32_t* sample, int32_t* path) {
  int64_t length = 0;
  int32_t current = 0;
  path[length++] = current;
  // Parents precede their children, so one pass finds the whole path.
  for (int32_t node = 1; node <= n_nodes; ++node) {
    if (parent[node] != current || token[node] != sample[current]) continue;
    current = node;
    path[length++] = current;
  }
  return length;
}

}  // namespace kdt::spec
