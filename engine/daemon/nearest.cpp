#include "nearest.h"

#include <algorithm>

namespace kdt {
namespace {

constexpr size_t kLongestName = 64;

// Characters to insert, delete, change or swap with their neighbour to get from one to the other.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);   // of a[..i - 2], a[..i - 1], a[..i]
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view name, const std::vector<std::string>& names) {
  if (name.size() < 2 || name.size() > kLongestName) return "";
  std::string found;
  size_t least = std::max<size_t>(1, name.size() / 3) + 1;   // fewer edits than this
  for (const std::string& candidate : names) {
    const size_t n = edits(name, candidate);
    if (n < least) {
      least = n;
      found = candidate;
    }
  }
  if (!found.empty() || name.size() < 3) return found;
  const auto begins = [&](const std::string& candidate) { return candidate.compare(0, name.size(), name) == 0; };
  const auto first = std::find_if(names.begin(), names.end(), begins);
  return first == names.end() ? "" : *first;
}

}  // namespace kdt
