#include "capi/bundled.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

namespace kdt::capi {

BundledPaths bundled_paths() {
  std::filesystem::path models;
  const char* given = std::getenv("KDTREE_MODELS_DIR");
  Dl_info info{};
  if (given && *given) {
    models = given;
  } else if (dladdr(reinterpret_cast<const void*>(&bundled_paths), &info) && info.dli_fname) {
    models = std::filesystem::absolute(info.dli_fname).parent_path() / "models";
  }
  return {(models / "tiny-k2").string(), (models / "tiny-k2-dflash").string()};
}

}  // namespace kdt::capi
