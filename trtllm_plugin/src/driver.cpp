#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace granikv {
namespace {

struct Found {
    Driver driver;
    std::string error;
};

Found load() {
    Found found;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        found.error = std::string("libcuda.so.1: expected the CUDA driver, got ") + dlerror();
        return found;
    }
    auto const find = [&](char const* symbol, auto& function) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
        return function != nullptr;
    };
#define GRANIKV_FIND(name, symbol)                               \
    if (found.error.empty() && !find(symbol, found.driver.name)) \
        found.error = "libcuda.so.1: expected a driver of CUDA 12 or later, it has no " symbol;
    GRANIKV_DRIVER_FUNCTIONS(GRANIKV_FIND)
#undef GRANIKV_FIND
    find("cuFuncGetParamInfo", found.driver.cuFuncGetParamInfo);
    find("cuFuncLoad", found.driver.cuFuncLoad);
    if (found.error.empty()) {
        CUresult const result = found.driver.cuInit(0);
        if (result != CUDA_SUCCESS) {
            char const* text = nullptr;
            found.driver.cuGetErrorString(result, &text);
            found.error = std::string("cuInit: ") + (text ? text : "unknown error");
        }
    }
    return found;
}

}  // namespace

Driver const* findDriver(std::string& error) {
    static Found const found = load();
    error = found.error;
    return error.empty() ? &found.driver : nullptr;
}

void check(Driver const& driver, CUresult result, char const* what) {
    if (result == CUDA_SUCCESS) return;
    char const* text = nullptr;
    driver.cuGetErrorString(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text ? text : "unknown error") + " (" +
                             std::to_string(static_cast<int>(result)) + ")");
}

}  // namespace granikv
