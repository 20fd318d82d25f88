// The engine's running figures, as kdtree.h hands them out.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kdtree.h"

namespace kdt {

struct Figures {
  // Same index; the names live as long as the engine.
  std::vector<const char*> names;
  std::vector<double> values;

  static Figures read(kdt_engine* engine);

  // The value of a series; 0 where the engine has none of the name.
  double at(std::string_view name) const;
};

struct FigureFamily {
  std::string_view name;   // static, like the help
  std::string_view help;
  int32_t kind;            // KDT_FIGURE_*
};
std::vector<FigureFamily> figure_families();

}  // namespace kdt
