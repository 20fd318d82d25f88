// What a misspelt name probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kdt {

// Of `names` the one that is spelt most like `name`, or the first that begins with it; empty where none is near. What
// all of them begin with is no likeness: leave it out.
std::string nearest(std::string_view name, const std::vector<std::string>& names);

}  // namespace kdt
