// The model that is installed beside the library.
#pragma once

#include <string>

namespace kdt::capi {

struct BundledPaths {
  std::string model, draft;
};

// `models/tiny-k2` and `models/tiny-k2-dflash` beside this library, or below KDTREE_MODELS_DIR when that is set.
BundledPaths bundled_paths();

}  // namespace kdt::capi
