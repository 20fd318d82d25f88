// Plain-text tables and numbers for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kdt {

class Table {
 public:
  explicit Table(std::vector<std::string> header = {}) : header_(std::move(header)) {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  // A line of dashes between rows.
  void add_rule() { rows_.emplace_back(); }
  bool empty() const noexcept { return rows_.empty(); }
  // Columns two spaces apart; the first `n_left` are aligned left, the others right. Ends in a newline.
  std::string render(size_t n_left) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// "1 rank", "8 ranks"
std::string counted(int64_t n, std::string_view noun);
std::string fixed(double value, int digits);
// At most so many significant digits: 1e-06, 0.13397, 50000.
std::string significant(double value, int digits);
// "16.2 MiB"
std::string byte_count(double bytes);

}  // namespace kdt
