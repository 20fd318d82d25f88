#include "checkpoint/json_fields.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace kdt {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;
// Commas, colons and openings: bounds the values, and so the memory of the parsed document (a value takes at most about
// 80 bytes). The index of a checkpoint of 200,000 tensors has 400,000, its tensors' headers 3 million.
constexpr size_t kMaxValues = 8'000'000;

void check_extent(std::string_view text, const std::string& file) {
  size_t depth = 0, n_values = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++n_values;
      if (++depth > kMaxDepth) {
        fail(Status::bad_file, file, "JSON nested too deep", "at most " + std::to_string(kMaxDepth) + " levels");
      }
    } else if (c == '}' || c == ']') {
      if (depth > 0) --depth;
    } else if (c == ',' || c == ':') {
      ++n_values;
    }
  }
  if (n_values > kMaxValues) {
    fail(Status::bad_file, file, std::to_string(n_values) + " JSON values", "at most " + std::to_string(kMaxValues));
  }
}

std::string range(const std::string& low, const std::string& high) { return "from " + low + " to " + high; }

std::string spelled(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// For messages: a scalar as it is written, of a container only its kind, which bounds the work.
std::string brief(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array of " + std::to_string(value.size());
  return value.dump();
}

bool fits_int64(const json& value) {
  return value.is_number_integer() &&
         !(value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
}

}  // namespace

json parse_json_object(std::string_view text, const std::string& file) {
  check_extent(text, file);
  // The parser takes a NUL for the end of the text.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    fail(Status::bad_file, file, "a NUL at byte " + std::to_string(nul), "well-formed JSON in UTF-8");
  }
  std::vector<std::set<std::string>> keys(kMaxDepth + 2);  // of the open objects, by depth
  const auto refuse_twice = [&](int depth, json::parse_event_t event, json& parsed) {
    const size_t level = static_cast<size_t>(depth);
    if (event == json::parse_event_t::object_start) keys.at(level + 1).clear();
    if (event == json::parse_event_t::key && !keys.at(level).insert(parsed.get<std::string>()).second) {
      fail(Status::bad_file, file, "\"" + parsed.get<std::string>() + "\" twice", "each key of a JSON object once");
    }
    return true;
  };
  json document;
  try {
    document = json::parse(text.begin(), text.end(), refuse_twice);
  } catch (const json::parse_error& error) {
    fail(Status::bad_file, file, "JSON error at byte " + std::to_string(error.byte), "well-formed JSON in UTF-8");
  } catch (const json::exception&) {  // a number beyond a double
    fail(Status::bad_file, file, "a JSON value out of range", "well-formed JSON in UTF-8");
  }
  if (!document.is_object()) fail(Status::bad_file, file, brief(document), "a JSON object");
  return document;
}

Fields::Fields(const json& object, std::string file, std::string path)
    : object_(&object), file_(std::move(file)), path_(std::move(path)) {}

std::string Fields::subject(const std::string& key) const {
  return file_ + ": " + (path_.empty() ? key : path_ + "." + key);
}

void Fields::refuse(Status status, const std::string& key, std::string_view expected) const {
  fail(status, subject(key), has(key) ? brief(object_->at(key)) : "absent", expected);
}

bool Fields::has(const std::string& key) const {
  const auto it = object_->find(key);
  return it != object_->end() && !it->is_null();
}

bool Fields::is_list(const std::string& key) const { return has(key) && object_->at(key).is_array(); }

const json& Fields::at(const std::string& key, std::string_view expected) const {
  if (!has(key)) refuse(Status::bad_file, key, expected);
  return object_->at(key);
}

int64_t Fields::integer(const std::string& key, int64_t low, int64_t high) const {
  const std::string expected = "an integer " + range(std::to_string(low), std::to_string(high));
  const json& value = at(key, expected);
  if (!fits_int64(value)) refuse(Status::bad_file, key, expected);
  const int64_t number = value.get<int64_t>();
  if (number < low || number > high) refuse(Status::bad_file, key, expected);
  return number;
}

int64_t Fields::integer_or(const std::string& key, int64_t fallback, int64_t low, int64_t high) const {
  return has(key) ? integer(key, low, high) : fallback;
}

double Fields::number(const std::string& key, double low, double high) const {
  const std::string expected = "a number " + range(spelled(low), spelled(high));
  const json& value = at(key, expected);
  if (!value.is_number()) refuse(Status::bad_file, key, expected);
  const double number = value.get<double>();
  if (!(number >= low && number <= high)) refuse(Status::bad_file, key, expected);
  return number;
}

double Fields::number_or(const std::string& key, double fallback, double low, double high) const {
  return has(key) ? number(key, low, high) : fallback;
}

bool Fields::boolean(const std::string& key) const {
  const json& value = at(key, "true or false");
  if (!value.is_boolean()) refuse(Status::bad_file, key, "true or false");
  return value.get<bool>();
}

bool Fields::boolean_or(const std::string& key, bool fallback) const { return has(key) ? boolean(key) : fallback; }

std::string Fields::text(const std::string& key) const {
  const json& value = at(key, "a string");
  if (!value.is_string()) refuse(Status::bad_file, key, "a string");
  return value.get<std::string>();
}

Fields Fields::object(const std::string& key) const {
  const json& value = at(key, "an object");
  if (!value.is_object()) refuse(Status::bad_file, key, "an object");
  return Fields(value, file_, path_.empty() ? key : path_ + "." + key);
}

std::vector<int64_t> Fields::integers(const std::string& key, int64_t low, int64_t high) const {
  const std::string each = "integers " + range(std::to_string(low), std::to_string(high));
  const json& value = at(key, "a list of " + each);
  if (!value.is_array()) refuse(Status::bad_file, key, "a list of " + each);
  std::vector<int64_t> out;
  for (const json& item : value) {
    if (!fits_int64(item) || item.get<int64_t>() < low || item.get<int64_t>() > high) {
      fail(Status::bad_file, subject(key), brief(item), each);
    }
    out.push_back(item.get<int64_t>());
  }
  return out;
}

std::vector<std::string> Fields::texts(const std::string& key) const {
  const json& value = at(key, "a list of strings");
  if (!value.is_array()) refuse(Status::bad_file, key, "a list of strings");
  std::vector<std::string> out;
  for (const json& item : value) {
    if (!item.is_string()) fail(Status::bad_file, subject(key), brief(item), "a list of strings");
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<std::string> Fields::keys() const {
  std::vector<std::string> out;
  for (const auto& item : object_->items()) out.push_back(item.key());
  return out;
}

void Fields::only_text(const std::string& key, std::string_view value) const {
  if (has(key) && text(key) != value) refuse(Status::unsupported, key, value);
}

void Fields::only_integer(const std::string& key, int64_t value) const {
  if (has(key) && integer(key, INT64_MIN, INT64_MAX) != value) {
    refuse(Status::unsupported, key, std::to_string(value));
  }
}

void Fields::only_boolean(const std::string& key, bool value) const {
  if (has(key) && boolean(key) != value) refuse(Status::unsupported, key, value ? "true" : "false");
}

void Fields::only_absent(const std::string& key) const {
  if (has(key)) refuse(Status::unsupported, key, "no such field");
}

}  // namespace kdt
