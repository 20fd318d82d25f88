#include "text/tool_declaration.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "text/json_text.h"

namespace kdt {
namespace {

using nlohmann::ordered_json;

struct NoForm {};   // thrown and caught in this file alone

struct Field;

struct Type {
  enum class Kind { text, object, array, any_of } kind = Kind::text;
  std::string text;                     // of kind text: complete
  std::string description;
  std::string constraints;              // `minimum: 0, maximum: 9`
  std::vector<Field> fields;            // of an object, in key order
  std::vector<Type> members;            // of any_of; the item of an array
  std::vector<Type> additional;         // of an object: none or one
};

struct Field {
  std::string name;
  bool optional;
  std::string default_value;            // empty: none
  Type type;
};

// One function's `$defs` and what its schema refers to.
struct Definitions {
  std::vector<std::pair<std::string, const ordered_json*>> all;
  bool refers_to_root = false;

  void add(const std::string& name, const ordered_json& schema) {
    auto same = std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == name; });
    if (same == all.end()) {
      all.emplace_back(name, &schema);
    } else {
      same->second = &schema;
    }
  }
};

const ordered_json* member(const ordered_json& object, const char* key) {
  auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

// Python's truth value.
bool is_true(const ordered_json* value) {
  if (!value || value->is_null()) return false;
  if (value->is_boolean()) return value->get<bool>();
  if (value->is_number()) return value->get<double>() != 0;
  if (value->is_string()) return !value->get_ref<const std::string&>().empty();
  return !value->empty();
}

// Python's str() of a scalar.
std::string scalar_text(const ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number()) return dump_json(value, ",", ":");
  throw NoForm();
}

std::string description_of(const ordered_json& schema) {
  const ordered_json* description = member(schema, "description");
  if (!is_true(description)) return {};
  if (!description->is_string()) throw NoForm();
  return description->get<std::string>();
}

std::string comment(std::string_view text, const std::string& indent) {
  std::string out;
  while (true) {
    size_t end = std::min(text.find('\n'), text.size());
    if (end > 0) out.append(indent).append("// ").append(text.substr(0, end));
    if (end == text.size()) return out;
    out += '\n';
    text.remove_prefix(end + 1);
  }
}

// ---- schema to Type

Type parse_type(const ordered_json& schema, Definitions& definitions);

void set_constraints(Type& type, const ordered_json& schema, std::initializer_list<const char*> ascending_keys) {
  for (const char* key : ascending_keys) {
    const ordered_json* value = member(schema, key);
    if (!value) continue;
    if (!type.constraints.empty()) type.constraints += ", ";
    type.constraints += std::string(key) + ": " + scalar_text(*value);
  }
}

std::string default_text(const ordered_json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  return dump_json(value, ", ", ": ");
}

Type parse_object(const ordered_json& schema, Definitions& definitions) {
  Type type;
  type.kind = Type::Kind::object;
  type.description = description_of(schema);
  if (const ordered_json* defs = member(schema, "$defs"); is_true(defs)) {
    if (!defs->is_object()) throw NoForm();
    for (const auto& [name, definition] : defs->items()) definitions.add(name, definition);
  }
  const ordered_json* additional = member(schema, "additionalProperties");
  if (additional && !additional->is_null()) {
    if (additional->is_boolean()) {
      type.additional.emplace_back().text = additional->get<bool>() ? "any" : "never";
    } else {
      type.additional.push_back(parse_type(*additional, definitions));
    }
  }
  const ordered_json* properties = member(schema, "properties");
  if (!properties) return type;
  const ordered_json* required = member(schema, "required");
  if (!properties->is_object() || (required && !required->is_array())) throw NoForm();
  for (const auto& [name, property] : properties->items()) {
    Field field;
    field.name = name;
    field.optional = !required || std::find(required->begin(), required->end(), ordered_json(name)) == required->end();
    field.type = parse_type(property, definitions);
    const ordered_json* value = property.is_object() ? member(property, "default") : nullptr;
    if (value && !value->is_null()) field.default_value = default_text(*value);
    type.fields.push_back(std::move(field));
  }
  return type;
}

// Whether a value fits the type that an enumeration declares; types without a rule of their own take anything.
bool fits(const ordered_json& value, const ordered_json& type) {
  if (value.is_null() || !type.is_string()) return true;
  const std::string& name = type.get_ref<const std::string&>();
  if (name == "string") return value.is_string();
  if (name == "number") return value.is_number() || value.is_boolean();
  if (name == "integer") return value.is_number_integer() || value.is_boolean();
  return name != "boolean" || value.is_boolean();
}

Type parse_enum(const ordered_json& schema) {
  const ordered_json& values = schema.at("enum");
  if (!values.is_array()) throw NoForm();
  ordered_json declared;
  if (const ordered_json* named = member(schema, "type")) {
    declared = *named;
    if (declared.is_array()) {
      if (declared.size() == 2) {
        if (declared[0] != "null" && declared[1] != "null") throw NoForm();
        declared = ordered_json(declared[0] != "null" ? declared[0] : declared[1]);
      } else if (declared.size() == 1) {
        declared = ordered_json(declared[0]);
      } else {
        throw NoForm();
      }
    }
  }
  Type type;
  type.description = description_of(schema);
  for (const ordered_json& value : values) {
    if (!fits(value, declared)) throw NoForm();
    if (&value != &values.front()) type.text += " | ";
    type.text += value.is_string() ? '"' + value.get<std::string>() + '"' : scalar_text(value);
  }
  return type;
}

Type parse_union(const ordered_json& schema) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"string", "string"},   {"number", "number"}, {"integer", "number"},  {"boolean", "boolean"},
      {"null", "null"},       {"object", "{}"},     {"array", "Array<any>"}};
  Type type;
  type.description = description_of(schema);
  for (const ordered_json& name : schema.at("type")) {
    auto known = std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& entry) {
      return name.is_string() && entry.first == name.get_ref<const std::string&>();
    });
    if (known == std::end(kNames)) throw NoForm();
    if (!type.text.empty()) type.text += " | ";
    type.text += known->second;
  }
  return type;
}

Type parse_reference(const ordered_json& schema, Definitions& definitions) {
  const ordered_json& target = schema.at("$ref");
  if (!target.is_string()) throw NoForm();
  std::string_view path = target.get_ref<const std::string&>();
  Type type;
  type.description = description_of(schema);
  if (path == "#") {
    definitions.refers_to_root = true;
    type.text = "parameters";
    return type;
  }
  if (!path.starts_with("#/$defs/")) throw NoForm();
  type.text = path.substr(path.rfind('/') + 1);
  auto known = std::find_if(definitions.all.begin(), definitions.all.end(),
                            [&](const auto& entry) { return entry.first == type.text; });
  if (known == definitions.all.end() || !known->second->is_object()) throw NoForm();
  return type;
}

Type parse_type(const ordered_json& schema, Definitions& definitions) {
  Type type;
  if (schema.is_boolean()) {
    type.text = schema.get<bool>() ? "any" : "null";
    return type;
  }
  if (!schema.is_object()) throw NoForm();
  if (member(schema, "$ref")) return parse_reference(schema, definitions);
  if (const ordered_json* choices = member(schema, "anyOf")) {
    if (!choices->is_array()) throw NoForm();
    type.kind = Type::Kind::any_of;
    type.description = description_of(schema);
    for (const ordered_json& choice : *choices) type.members.push_back(parse_type(choice, definitions));
    return type;
  }
  if (member(schema, "enum")) return parse_enum(schema);
  const ordered_json* named = member(schema, "type");
  if (!named) {
    if (!schema.empty()) throw NoForm();
    type.text = "any";
    return type;
  }
  if (named->is_array()) return parse_union(schema);
  if (!named->is_string()) throw NoForm();
  type.text = named->get<std::string>();
  if (type.text == "object") return parse_object(schema, definitions);
  type.description = description_of(schema);
  if (type.text == "array") {
    type.kind = Type::Kind::array;
    set_constraints(type, schema, {"maxItems", "minItems"});
    const ordered_json* items = member(schema, "items");
    if (is_true(items)) {
      type.members.push_back(parse_type(*items, definitions));
    } else {
      type.members.emplace_back().text = "any";
    }
  } else if (type.text == "string") {
    set_constraints(type, schema, {"maxLength", "minLength", "pattern"});
  } else if (type.text == "number" || type.text == "integer") {
    set_constraints(type, schema, {"maximum", "minimum"});
    type.text = "number";
  }
  return type;
}

// ---- Type to text

std::string render(const Type& type, const std::string& indent);

std::string docstring(const Type& type, const std::string& indent) {
  std::string out;
  if (!type.description.empty()) out += comment(type.description, indent) + "\n";
  if (!type.constraints.empty()) out += indent + "// " + type.constraints + "\n";
  return out;
}

std::string render_field(const Field& field, const std::string& indent) {
  std::string out = docstring(field.type, indent);
  if (!field.default_value.empty()) out += indent + "// Default: " + field.default_value + "\n";
  return out + indent + field.name + (field.optional ? "?: " : ": ") + render(field.type, indent);
}

// `{`, the lines between commas, `}`; nothing between the braces when there is none.
std::string braces(const std::vector<std::string>& lines, const std::string& indent) {
  if (lines.empty()) return "{}";
  std::string out = "{\n";
  for (const std::string& line : lines) {
    if (&line != &lines.front()) out += ",\n";
    out += line;
  }
  return out + "\n" + indent + "}";
}

std::string render(const Type& type, const std::string& indent) {
  const std::string inner = indent + "  ";
  switch (type.kind) {
    case Type::Kind::text:
      return type.text;
    case Type::Kind::object: {
      std::vector<std::string> lines;
      for (bool optional : {false, true}) {
        for (const Field& field : type.fields) {
          if (field.optional == optional) lines.push_back(render_field(field, inner));
        }
      }
      if (!type.additional.empty()) lines.push_back(inner + "[k: string]: " + render(type.additional[0], inner));
      return braces(lines, indent);
    }
    case Type::Kind::array: {
      const Type& item = type.members[0];
      std::string notes = docstring(item, inner);
      if (notes.empty()) return "Array<" + render(item, indent) + ">";
      return "Array<\n" + notes + inner + render(item, inner) + "\n" + indent + ">";
    }
    case Type::Kind::any_of: {
      std::string out;
      for (const Type& choice : type.members) {
        if (&choice != &type.members.front()) out += " | ";
        out += render(choice, indent);
      }
      return out;
    }
  }
  return {};
}

std::string render_function(const ordered_json& function) {
  static const ordered_json kNoParameters = ordered_json::object();
  const ordered_json* given = member(function, "parameters");
  const ordered_json& parameters = is_true(given) ? *given : kNoParameters;
  if (!parameters.is_object()) throw NoForm();
  Definitions definitions;
  Type root = parse_object(parameters, definitions);

  std::vector<std::string> lines;
  std::string argument;
  if (definitions.refers_to_root) {
    argument = "parameters";
    std::vector<std::string> fields;
    for (const Field& field : root.fields) fields.push_back(render_field(field, "  "));
    lines.push_back("interface parameters " + braces(fields, ""));
  } else {
    argument = render(root, "");
  }
  // Definitions met while these are read are known to references, but have no interface of their own.
  auto declared = definitions.all;
  for (const auto& [name, schema] : declared) {
    if (!schema->is_object()) throw NoForm();
    std::string description = description_of(*schema);
    std::string body = render(parse_type(*schema, definitions), "");
    lines.push_back((description.empty() ? "" : comment(description, "") + "\n") + "interface " + name + " " + body);
  }
  if (std::string description = description_of(function); !description.empty()) {
    lines.push_back(comment(description, ""));
  }
  const ordered_json* name = member(function, "name");
  lines.push_back("type " + (name ? scalar_text(*name) : "function") + " = (_: " + argument + ") => any;");

  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

}  // namespace

ordered_json sort_keys(const ordered_json& value) {
  if (value.is_array()) {
    ordered_json out = ordered_json::array();
    for (const ordered_json& item : value) out.push_back(sort_keys(item));
    return out;
  }
  if (!value.is_object()) return value;
  std::vector<std::string> keys;
  for (const auto& entry : value.items()) keys.push_back(entry.key());
  std::sort(keys.begin(), keys.end());
  ordered_json out = ordered_json::object();
  for (const std::string& key : keys) out[key] = sort_keys(value.at(key));
  return out;
}

std::optional<std::string> typescript_tools(const ordered_json& tools) {
  const ordered_json sorted = sort_keys(tools);
  std::string functions;
  try {
    for (const ordered_json& tool : sorted) {
      const ordered_json* function = member(tool, "function");
      if (is_true(function)) functions += render_function(*function);
    }
  } catch (const NoForm&) {
    return std::nullopt;
  }
  if (functions.empty()) return std::nullopt;
  return "# Tools\n\n## functions\nnamespace functions {\n" + functions + "}\n";
}

}  // namespace kdt
