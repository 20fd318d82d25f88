// The pool of 64-token pages. A page id names a place in every layer's pool, of the target and of the drafter alike.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/types.h"

namespace kdt {

constexpr int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

class PagePool {
 public:
  explicit PagePool(int64_t n_pages) {
    for (int64_t id = n_pages; id > 0; --id) free_.push_back(static_cast<int32_t>(id - 1));
  }
  int64_t n_free() const { return static_cast<int64_t>(free_.size()); }

  // `n` pages, or none at all when there are not that many.
  std::vector<int32_t> take(int64_t n) {
    if (n > n_free()) return {};
    std::vector<int32_t> pages(free_.rbegin(), free_.rbegin() + n);
    free_.resize(free_.size() - static_cast<size_t>(n));
    return pages;
  }
  void give_back(std::vector<int32_t>& pages) {
    free_.insert(free_.end(), pages.rbegin(), pages.rend());
    pages.clear();
  }

 private:
  std::vector<int32_t> free_;   // the last one is taken first: memory that was touched before is used again
};

}  // namespace kdt
