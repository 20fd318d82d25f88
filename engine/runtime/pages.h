// The pool of 64-token pages and the prefix cache over it. A page id names a place in every layer's pool, of the target and
// of the drafter alike.
//
// A page is free, in use by one or more streams, or idle: in use by none but kept for its tokens. A block is the 64 tokens
// of a full page; it is known by its own tokens and the block before it, compared whole, so that equal keys mean equal
// prefixes. Equal prefixes have equal bits (design, invariant 1), so a stream that filled a block which is known already
// takes the known page and gives up its own. Idle pages are evicted least recently used first; a block's successors
// are never newer than itself, so that it outlives them. Decode thread only.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/types.h"

namespace kdt {

constexpr int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

class Pages {
 public:
  // `keep_prefixes`: false: no page is ever shared or idle.
  Pages(int64_t n_pages, bool keep_prefixes);

  bool keeps_prefixes() const { return keep_prefixes_; }
  int64_t n_pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t n_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t n_idle() const { return static_cast<int64_t>(idle_.size()); }
  int64_t n_in_use() const { return n_pages() - n_free() - n_idle(); }
  int64_t available() const { return n_free() + n_idle(); }

  struct Match {
    int64_t blocks = 0;    // of the longest known prefix
    int64_t idle = 0;      // of those, pages no stream uses: they count as available until they are taken
  };
  // Of at most `most` blocks of these tokens.
  Match match(std::span<const int32_t> tokens, int64_t most) const;
  // Appends the pages of the first `blocks` known blocks of these tokens, each with one more user.
  void take_prefix(std::span<const int32_t> tokens, int64_t blocks, std::vector<int32_t>& to);
  // Appends `n` pages nobody uses, evicting idle ones when none is free; false, and nothing, when there are not that many.
  bool take(int64_t n, std::vector<int32_t>& to);
  // `pages[block]` now holds committed tokens [64 * block, 64 * (block + 1)) of a stream with these tokens, whose earlier
  // blocks were recorded. May replace the page by one with the same bits.
  void record(std::span<const int32_t> tokens, int64_t block, std::vector<int32_t>& pages);
  // A stream ends: its pages lose a user.
  void give_back(std::vector<int32_t>& pages);
  // Frees every idle page; returns how many.
  int64_t forget_idle();

  // For tests, after any operation: every page is in exactly one state and has as many users as `streams` (page tables)
  // hold it. What is wrong, or nothing.
  std::optional<std::string> find_fault(std::span<const std::vector<int32_t>* const> streams) const;

 private:
  using Key = std::vector<int32_t>;      // page of the block before (-1: none), then 64 tokens
  struct Page {
    int32_t users = 0;
    bool known = false;
    std::map<Key, int32_t>::iterator block;      // when known
    std::list<int32_t>::iterator idle;           // when known and without users
  };
  Key key(std::span<const int32_t> tokens, int64_t block, int32_t before) const;
  void use(int32_t page);
  void release(int32_t page);
  void evict(int32_t page);

  bool keep_prefixes_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;            // the last one is taken first: memory that was touched before is used again
  std::list<int32_t> idle_;              // least recently used first
  std::map<Key, int32_t> blocks_;
};

}  // namespace kdt
