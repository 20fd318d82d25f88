#include "bench_prompts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "failure.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

std::string bundled_path() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) fail_run("/proc/self/exe", error.message(), "the path of this program");
  return (program.parent_path() / "bench_prompts.json").string();
}

Json read_array(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail_run(path, "cannot be opened", "a readable file");
  Json array = Json::parse(file, nullptr, false);
  if (!array.is_array()) fail_run(path, "something else", "a JSON array of prompts");
  return array;
}

std::string field(const Json& entry, const char* name, const std::string& where) {
  const auto found = entry.find(name);
  if (found == entry.end() || !found->is_string()) fail_run(where, std::string("no text in ") + name, "a string");
  return found->get<std::string>();
}

}  // namespace

std::vector<BenchPrompt> load_bench_prompts(const Engine& engine, const std::string& path,
                                            const std::vector<std::string>& kinds, int32_t per_kind) {
  const std::string file = path.empty() ? bundled_path() : path;
  const Json array = read_array(file);
  std::vector<BenchPrompt> prompts;
  std::map<std::string, int32_t> taken;
  for (size_t i = 0; i < array.size(); ++i) {
    const std::string where = file + " prompt " + std::to_string(i);
    const Json& entry = array[i];
    if (!entry.is_object()) fail_run(where, entry.type_name(), "an object with kind, name and text or messages");
    BenchPrompt prompt{field(entry, "kind", where), field(entry, "name", where), {}};
    if (!kinds.empty() && std::find(kinds.begin(), kinds.end(), prompt.kind) == kinds.end()) continue;
    if (per_kind > 0 && taken[prompt.kind] >= per_kind) continue;
    ++taken[prompt.kind];
    prompt.ids = entry.contains("messages") ? engine.encode_chat(entry["messages"].dump(), KDT_THINKING_DEFAULT)
                                            : engine.tokenize(field(entry, "text", where));
    if (prompt.ids.empty()) fail_run(where, "", "at least one token");
    prompts.push_back(std::move(prompt));
  }
  for (const std::string& kind : kinds) {
    if (taken.find(kind) == taken.end()) fail_run("--kinds", kind, "a kind of prompt in " + file);
  }
  if (prompts.empty()) fail_run(file, "no prompts", "at least one prompt");
  return prompts;
}

}  // namespace kdt
