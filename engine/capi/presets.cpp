#include "capi/presets.h"

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "capi/bundled.h"
#include "checkpoint/config_limits.h"

namespace kdt::capi {

Places places_of(const char* model_path, const char* preset, const char* draft_path) {
  check_argument((model_path != nullptr) != (preset != nullptr), "model_path and preset", model_path ? "both" : "neither",
                 "one of them");
  if (model_path) {
    check_argument(*model_path != 0, "model_path", "empty", "a checkpoint directory");
    return {model_path, draft_path ? draft_path : ""};
  }
  const std::string name = preset;
  const auto presets = std::filesystem::path(bundled_paths().model).parent_path() / "presets";
  const bool plain = !name.empty() && name.find('/') == std::string::npos && name.find("..") == std::string::npos;
  const std::string model = (presets / name).string(), draft = model + "-dflash";
  check_argument(plain && file_exists(model + "/" + kConfigName), "preset", name,
                 "a folder of " + presets.string() + " such as kimi-k2.6");
  if (draft_path) return {model, draft_path};
  return {model, file_exists(draft + "/" + kConfigName) ? draft : ""};
}

}  // namespace kdt::capi
