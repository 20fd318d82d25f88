// Standard output that knows when nobody reads it any more.
#pragma once

#include <string_view>

namespace kdt {

// Writes all of it at once, unbuffered, so that streamed text arrives as it is made. False: the reader has gone
// (EPIPE). Throws Failure for any other error, such as a full disk.
bool write_stdout(std::string_view text);
bool stdout_is_terminal();
bool stderr_is_terminal();
// Whether both lead to the same file, pipe or terminal.
bool stderr_is_stdout();

}  // namespace kdt
