// The CUDA driver API, found at run time: the library loads on a machine without a driver.
#pragma once

#include <cuda.h>

#include <string>

namespace granikv {

// clang-format off
#define GRANIKV_DRIVER_FUNCTIONS(X) \
    X(cuInit, "cuInit") \
    X(cuDeviceGet, "cuDeviceGet") \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute") \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2") \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2") \
    X(cuModuleLoadData, "cuModuleLoadData") \
    X(cuModuleGetFunction, "cuModuleGetFunction") \
    X(cuFuncSetAttribute, "cuFuncSetAttribute") \
    X(cuFuncSetCacheConfig, "cuFuncSetCacheConfig") \
    X(cuLaunchKernelEx, "cuLaunchKernelEx") \
    X(cuStreamCreate, "cuStreamCreate") \
    X(cuStreamDestroy, "cuStreamDestroy_v2") \
    X(cuStreamWaitEvent, "cuStreamWaitEvent") \
    X(cuEventCreate, "cuEventCreate") \
    X(cuEventDestroy, "cuEventDestroy_v2") \
    X(cuEventRecord, "cuEventRecord") \
    X(cuGetErrorString, "cuGetErrorString") \
    X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled")
// clang-format on

struct Driver {
#define GRANIKV_MEMBER(name, symbol) decltype(&::name) name{};
    GRANIKV_DRIVER_FUNCTIONS(GRANIKV_MEMBER)
#undef GRANIKV_MEMBER
    // Absent before CUDA 12.4: offset and size of a kernel's parameter; loading it at once.
    CUresult (*cuFuncGetParamInfo)(CUfunction, size_t, size_t*, size_t*){};
    CUresult (*cuFuncLoad)(CUfunction){};
};

// The driver, or nullptr and why there is none. Looked for once.
Driver const* findDriver(std::string& error);

// Throws std::runtime_error that names the call and the driver's text.
void check(Driver const& driver, CUresult result, char const* what);

}  // namespace granikv
