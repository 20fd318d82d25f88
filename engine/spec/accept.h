// The walk that keeps what the target itself would have said (target-only sampling: exact for any tree).
#pragma once

#include <cstdint>

namespace kdt::spec {

// From the root (node 0) to a child whose token is the target's sample at the current node, as long as there is one.
// `sample` [n_nodes + 1] is the target's own next token after each node. `path` gets the accepted nodes, the root first;
// the sample at the last of them is the bonus token. Returns the length of the path, at least 1.
int64_t accept(int64_t n_nodes, const int32_t* token, const int32_t* parent, const int32_t* sample, int32_t* path);

}  // namespace kdt::spec
