// JSON files of a checkpoint directory, read as hostile input: capped in size, depth and number of values before they
// are parsed.
//
// Everything thrown is a kdt::Error whose subject is the file and the dotted path of the field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace kdt {

// The document; Error(bad_file) unless it is one well-formed JSON object in which no key occurs twice.
nlohmann::json parse_json_object(std::string_view text, const std::string& file);

// The fields of one JSON object. A field that is null counts as absent, as Hugging Face's readers have it.
class Fields {
 public:
  // Borrows `object`, which outlives it. `path` is the object's own dotted path, "" for the document.
  Fields(const nlohmann::json& object, std::string file, std::string path = "");

  bool has(const std::string& key) const;
  bool is_list(const std::string& key) const;
  int64_t integer(const std::string& key, int64_t low, int64_t high) const;
  int64_t integer_or(const std::string& key, int64_t fallback, int64_t low, int64_t high) const;
  double number(const std::string& key, double low, double high) const;
  double number_or(const std::string& key, double fallback, double low, double high) const;
  bool boolean(const std::string& key) const;
  bool boolean_or(const std::string& key, bool fallback) const;
  std::string text(const std::string& key) const;
  Fields object(const std::string& key) const;
  std::vector<int64_t> integers(const std::string& key, int64_t low, int64_t high) const;
  std::vector<std::string> texts(const std::string& key) const;
  std::vector<std::string> keys() const;

  // Error(unsupported) when the field is there and has another value.
  void only_text(const std::string& key, std::string_view value) const;
  void only_integer(const std::string& key, int64_t value) const;
  void only_boolean(const std::string& key, bool value) const;
  void only_absent(const std::string& key) const;

  [[noreturn]] void refuse(Status status, const std::string& key, std::string_view expected) const;

 private:
  const nlohmann::json& at(const std::string& key, std::string_view expected) const;
  std::string subject(const std::string& key) const;

  const nlohmann::json* object_;
  std::string file_, path_;
};

}  // namespace kdt
