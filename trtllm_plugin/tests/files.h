// Files as strings, and conditions that end the host with a text.
#pragma once

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace host {

inline void require(bool holds, char const* what) {
    if (!holds) throw std::runtime_error(what);
}

inline std::string readFile(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void writeFile(std::string const& path, std::string const& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace host
