#include "openai_json.h"

#include <unordered_set>
#include <utility>
#include <vector>

#include "openai_error.h"

namespace kdt::openai {
namespace {

// Receives the parser's events (which come without recursion) and builds the document, checking limits on the way.
class Reader : public nlohmann::json_sax<Json> {
 public:
  explicit Reader(int64_t max_depth) : max_depth_(max_depth) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto& keys = open_.back().keys;
    if (static_cast<int64_t>(keys.size()) >= kMaxMembers) {
      throw bad("an object of more than " + std::to_string(kMaxMembers) + " members");
    }
    if (!keys.insert(name).second) throw bad("the key '" + one_line(name) + "' occurs twice in one object");
    open_.back().key = std::move(name);
    return true;
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    const std::string_view text = error.what();
    const size_t end = text.find("] ");
    throw bad(one_line(end == std::string_view::npos ? text : text.substr(end + 2), 200));
  }

  Json take() { return std::move(root_); }

 private:
  struct Open {
    Json* value;
    std::unordered_set<std::string> keys;
    std::string key;
  };

  static ApiError bad(const std::string& what) {
    return ApiError(400, "invalid_json", "The request body is not a JSON object this server reads: " + what + ".");
  }

  template <class Value>
  Json* place(Value&& value) {
    if (open_.empty()) {
      root_ = std::forward<Value>(value);
      return &root_;
    }
    Open& top = open_.back();
    if (top.value->is_array()) {
      auto& items = top.value->get_ref<Json::array_t&>();
      items.emplace_back(std::forward<Value>(value));
      return &items.back();
    }
    // The key is new: append without the ordered object's linear look-up.
    auto& members = static_cast<std::vector<Json::object_t::value_type>&>(top.value->get_ref<Json::object_t&>());
    members.emplace_back(std::move(top.key), Json(std::forward<Value>(value)));
    return &members.back().second;
  }

  template <class Value>
  bool add(Value&& value) {
    place(std::forward<Value>(value));
    return true;
  }

  bool open(Json value) {
    if (static_cast<int64_t>(open_.size()) >= max_depth_) {
      throw bad("nesting deeper than " + std::to_string(max_depth_) + " levels");
    }
    // Pointers to open values stay good: nothing is appended to a container while one inside it is open.
    open_.push_back({place(std::move(value)), {}, {}});
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  int64_t max_depth_;
  Json root_;
  std::vector<Open> open_;
};

}  // namespace

Json read_object(std::string_view body, int64_t max_depth) {
  // The parser takes it for the end of the text.
  if (const size_t nul = body.find('\0'); nul != std::string_view::npos)
    throw ApiError(400, "invalid_json", "The request body has a NUL byte at " + std::to_string(nul) + ": expected a JSON object.");
  Reader reader(max_depth);
  Json::sax_parse(body.begin(), body.end(), &reader);
  Json json = reader.take();
  if (!json.is_object()) {
    const std::string found = json.is_string() ? write_json(json) : shown(json);
    throw ApiError(400, "invalid_json", "The request body is " + one_line(found) + ": expected a JSON object.");
  }
  return json;
}

std::string write_json(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string shown(const Json& value) {
  if (value.is_array()) return "an array";
  if (value.is_object()) return "an object";
  return value.is_string() ? value.get<std::string>() : write_json(value);
}

}  // namespace kdt::openai
