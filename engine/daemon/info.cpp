// kdtree-run info: what was loaded, and how.
#include <memory>
#include <string>

#include "client.h"
#include "commands.h"
#include "failure.h"
#include "options.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

// Longer arrays of numbers (the cost table) are shown by their length.
constexpr size_t kLongestList = 12;

struct InfoCommand {
  explicit InfoCommand(CLI::App& app) : flags(app) {}

  Flags flags;
  EngineFlags engine;
  bool list_devices = false;
  bool json = false;

  int run() const;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string cell(const std::string& key, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "none";
  if (value.is_number() && (ends_with(key, "_bytes") || key == "bytes")) {
    return value.dump() + " (" + byte_count(value.get<double>()) + ")";
  }
  if (value.is_array() && value.size() > kLongestList) return "[" + std::to_string(value.size()) + " values]";
  return value.dump();
}

void add_rows(Table& table, const Json& object, const std::string& prefix) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      add_rows(table, value, prefix + key + ".");
    } else {
      table.add({prefix + key, cell(key, value)});
    }
  }
}

int print_devices(bool json) {
  const Json found = Json::parse(kdt_devices_json());
  if (json) {
    write_stdout(found.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return kExitOk;
  }
  Table table({"device", "name", "capability", "memory", "free", "usable"});
  for (const Json& d : found["devices"])
    table.add({d["index"].dump(), d["name"].get<std::string>(), d["compute_capability"].get<std::string>(),
               byte_count(d["memory_bytes"].get<double>()), byte_count(d["free_bytes"].get<double>()),
               d["usable"].get<bool>() ? "yes" : "no: " + d["reason"].get<std::string>()});
  write_stdout(found["devices"].empty() ? "no CUDA device: " + cell("", found["error"]) + "\n" : table.render(3));
  return kExitOk;
}

int InfoCommand::run() const {
  if (list_devices) return print_devices(json);
  const Engine loaded(engine.to_options());
  const Json info = loaded.info();
  if (json) {
    write_stdout(info.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return kExitOk;
  }
  Table table;
  add_rows(table, info, "");
  write_stdout(std::string("kdtree-engine ") + kdt_version() + "\n" + table.render(2));
  return kExitOk;
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App* flags = app.add_subcommand("info", "Load the model and print what it is: config, sizes, backend, costs");
  const auto command = std::make_shared<InfoCommand>(*flags);
  command->engine.declare(command->flags);
  command->flags.toggle("--list-devices", command->list_devices, "List the CUDA devices instead; loads nothing");
  command->flags.toggle("--json", command->json, "Print the engine's JSON object");
  return {flags, [command] { return command->run(); }};
}

}  // namespace kdt
