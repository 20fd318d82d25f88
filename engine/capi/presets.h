// Where the configs are that a question about a model is asked for: a checkpoint's directory, or a preset of the package.
#pragma once

#include <string>

namespace kdt::capi {

struct Places {
  std::string model, draft;   // draft empty: none
};

// One of `model_path` and `preset` is given, the other NULL. A preset's folder holds a config.json and nothing else;
// `<name>-dflash` is its drafter, unless `draft_path` names another. Error(invalid_argument) naming what is wrong.
Places places_of(const char* model_path, const char* preset, const char* draft_path);

}  // namespace kdt::capi
