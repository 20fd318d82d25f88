#include "table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kdt {
namespace {

// Characters, not bytes: model paths and prompt names may hold any UTF-8.
size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

void append_row(std::string& out, const std::vector<std::string>& row, const std::vector<size_t>& widths,
                size_t n_left) {
  std::string line;
  for (size_t i = 0; i < row.size(); ++i) {
    const std::string padding(widths[i] - width_of(row[i]), ' ');
    if (i > 0) line += "  ";
    line += i < n_left ? row[i] + padding : padding + row[i];
  }
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + "\n";
}

}  // namespace

std::string Table::render(size_t n_left) const {
  std::vector<size_t> widths;
  const auto measure = [&](const std::vector<std::string>& row) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  };
  measure(header_);
  for (const auto& row : rows_) measure(row);
  size_t total = widths.empty() ? 0 : 2 * (widths.size() - 1);
  for (const size_t width : widths) total += width;

  std::string out;
  const std::string rule = std::string(total, '-') + "\n";
  if (!header_.empty()) {
    append_row(out, header_, widths, n_left);
    out += rule;
  }
  for (const auto& row : rows_) {
    if (row.empty()) {
      out += rule;
    } else {
      append_row(out, row, widths, n_left);
    }
  }
  return out;
}

std::string counted(int64_t n, std::string_view noun) {
  return std::to_string(n) + " " + std::string(noun) + (n == 1 ? "" : "s");
}

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char buffer[64];
  const int n = std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return n > 0 && n < static_cast<int>(sizeof(buffer)) ? std::string(buffer, static_cast<size_t>(n)) : "-";
}

std::string significant(double value, int digits) {
  char buffer[64];
  const int n = std::snprintf(buffer, sizeof(buffer), "%.*g", digits, value);
  return std::string(buffer, n > 0 && n < static_cast<int>(sizeof(buffer)) ? static_cast<size_t>(n) : 0);
}

std::string byte_count(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return fixed(bytes, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

}  // namespace kdt
