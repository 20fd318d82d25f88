// What stands in the header of a request, read.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kdt {

std::string lower_case(std::string_view text);   // of ASCII
bool is_json(std::string_view content_type);
// %XX of a path; nullopt for what is no such escape.
std::optional<std::string> percent_decoded(std::string_view text);
// "host" of "http://host:8000" and of "host:8000", in lower case; an IPv6 address with its brackets.
std::string host_of(std::string_view origin);
bool names_loopback(std::string_view host);

}  // namespace kdt
