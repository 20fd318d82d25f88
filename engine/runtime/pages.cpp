#include "runtime/pages.h"

#include <algorithm>

namespace kdt {

Pages::Pages(int64_t n_pages, bool keep_prefixes) : keep_prefixes_(keep_prefixes), pages_(static_cast<size_t>(n_pages)) {
  free_.reserve(pages_.size());
  for (int64_t id = n_pages; id > 0; --id) free_.push_back(static_cast<int32_t>(id - 1));
}

// A page can stand for its whole prefix: as long as a block is known, so are those before it, each in its page.
Pages::Key Pages::key(std::span<const int32_t> tokens, int64_t block, int32_t before) const {
  const auto own = tokens.subspan(static_cast<size_t>(block * kPageTokens), kPageTokens);
  Key key;
  key.reserve(kPageTokens + 1);
  key.push_back(before);
  key.insert(key.end(), own.begin(), own.end());
  return key;
}

Pages::Match Pages::match(std::span<const int32_t> tokens, int64_t most) const {
  Match match;
  if (!keep_prefixes_) return match;
  const int64_t n_blocks = std::min(most, static_cast<int64_t>(tokens.size()) / kPageTokens);
  for (int32_t before = -1; match.blocks < n_blocks; ++match.blocks) {
    const auto found = blocks_.find(key(tokens, match.blocks, before));
    if (found == blocks_.end()) break;
    before = found->second;
    match.idle += pages_[static_cast<size_t>(before)].users == 0;
  }
  return match;
}

void Pages::take_prefix(std::span<const int32_t> tokens, int64_t blocks, std::vector<int32_t>& to) {
  int32_t before = -1;
  for (int64_t block = 0; block < blocks; ++block) {
    before = blocks_.at(key(tokens, block, before));
    use(before);
    to.push_back(before);
  }
}

bool Pages::take(int64_t n, std::vector<int32_t>& to) {
  if (n > available()) return false;
  for (int64_t i = 0; i < n; ++i) {
    if (free_.empty()) evict(idle_.front());
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[static_cast<size_t>(page)].users = 1;
    to.push_back(page);
  }
  return true;
}

void Pages::record(std::span<const int32_t> tokens, int64_t block, std::vector<int32_t>& pages) {
  if (!keep_prefixes_) return;
  int32_t& page = pages[static_cast<size_t>(block)];
  if (pages_[static_cast<size_t>(page)].known) return;
  const int32_t before = block == 0 ? -1 : pages[static_cast<size_t>(block - 1)];
  const auto [at, is_new] = blocks_.emplace(key(tokens, block, before), page);
  if (is_new) {
    pages_[static_cast<size_t>(page)].known = true;
    pages_[static_cast<size_t>(page)].block = at;
    return;
  }
  use(at->second);
  release(page);
  page = at->second;
}

void Pages::give_back(std::vector<int32_t>& pages) {
  // The last block first: it is the first to be evicted.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) release(*page);
  pages.clear();
}

int64_t Pages::forget_idle() {
  const int64_t n = n_idle();
  while (!idle_.empty()) evict(idle_.front());
  return n;
}

void Pages::use(int32_t id) {
  Page& page = pages_[static_cast<size_t>(id)];
  if (page.users++ == 0) idle_.erase(page.idle);
}

void Pages::release(int32_t id) {
  Page& page = pages_[static_cast<size_t>(id)];
  if (--page.users > 0) return;
  if (page.known) {
    page.idle = idle_.insert(idle_.end(), id);
  } else {
    free_.push_back(id);
  }
}

void Pages::evict(int32_t id) {
  Page& page = pages_[static_cast<size_t>(id)];
  idle_.erase(page.idle);
  blocks_.erase(page.block);
  page.known = false;
  free_.push_back(id);
}

std::optional<std::string> Pages::find_fault(std::span<const std::vector<int32_t>* const> streams) const {
  std::vector<int32_t> users(pages_.size(), 0), places(pages_.size(), 0);
  for (const auto* stream : streams)
    for (const int32_t page : *stream) ++users[static_cast<size_t>(page)];
  for (const int32_t page : free_) ++places[static_cast<size_t>(page)];
  for (const int32_t page : idle_) ++places[static_cast<size_t>(page)];
  size_t n_known = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const std::string name = "page " + std::to_string(i) + ": ";
    if (pages_[i].users != users[i])
      return name + std::to_string(pages_[i].users) + " users counted, " + std::to_string(users[i]) + " found";
    if (places[i] != (users[i] == 0)) return name + "listed " + std::to_string(places[i]) + " times, users " + std::to_string(users[i]);
    n_known += pages_[i].known;
    if (!pages_[i].known) continue;
    if (pages_[i].block->second != static_cast<int32_t>(i)) return name + "its block names another page";
    const int32_t before = pages_[i].block->first.front();
    if (before >= 0 && !pages_[static_cast<size_t>(before)].known) return name + "the block before it is forgotten";
    if (before >= 0 && users[i] > 0 && users[static_cast<size_t>(before)] == 0) return name + "used without the block before it";
  }
  for (const int32_t page : free_)
    if (pages_[static_cast<size_t>(page)].known) return "page " + std::to_string(page) + ": free and known";
  if (n_known != blocks_.size()) return "blocks: " + std::to_string(blocks_.size()) + " for " + std::to_string(n_known) + " pages";
  return std::nullopt;
}

}  // namespace kdt
