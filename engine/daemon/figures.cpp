#include "figures.h"

#include <algorithm>

#include "client.h"

namespace kdt {

Figures Figures::read(kdt_engine* engine) {
  Figures figures;
  int64_t n = 0;
  kdt_status status = kdt_engine_figures(engine, nullptr, nullptr, 0, &n);
  // The list may grow between the calls.
  while (status == KDT_ERR_BUFFER_TOO_SMALL) {
    figures.names.resize(static_cast<size_t>(n));
    figures.values.resize(static_cast<size_t>(n));
    status = kdt_engine_figures(engine, figures.names.data(), figures.values.data(), n, &n);
  }
  check(status);
  figures.names.resize(static_cast<size_t>(n));
  figures.values.resize(static_cast<size_t>(n));
  return figures;
}

double Figures::at(std::string_view name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? 0 : values[static_cast<size_t>(found - names.begin())];
}

std::vector<FigureFamily> figure_families() {
  int64_t n = 0;
  std::vector<const char*> names;
  std::vector<const char*> helps;
  std::vector<int32_t> kinds;
  kdt_status status = kdt_figure_families(nullptr, nullptr, nullptr, 0, &n);
  if (status == KDT_ERR_BUFFER_TOO_SMALL) {
    names.resize(static_cast<size_t>(n));
    helps.resize(static_cast<size_t>(n));
    kinds.resize(static_cast<size_t>(n));
    status = kdt_figure_families(names.data(), kinds.data(), helps.data(), n, &n);
  }
  check(status);
  std::vector<FigureFamily> families;
  for (size_t i = 0; i < names.size(); ++i) families.push_back({names[i], helps[i], kinds[i]});
  return families;
}

}  // namespace kdt
