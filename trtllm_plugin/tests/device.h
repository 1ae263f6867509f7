// The part of the CUDA driver API that the test host itself needs, found at run time.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace host {

// clang-format off
#define HOST_DRIVER_FUNCTIONS(X) \
    X(cuInit, "cuInit") X(cuDeviceGet, "cuDeviceGet") \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") X(cuCtxSetCurrent, "cuCtxSetCurrent") \
    X(cuMemAlloc, "cuMemAlloc_v2") X(cuMemFree, "cuMemFree_v2") \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2") X(cuMemcpyDtoH, "cuMemcpyDtoH_v2") \
    X(cuMemsetD8, "cuMemsetD8_v2") \
    X(cuStreamCreate, "cuStreamCreate") X(cuStreamSynchronize, "cuStreamSynchronize") \
    X(cuStreamBeginCapture, "cuStreamBeginCapture_v2") X(cuStreamEndCapture, "cuStreamEndCapture") \
    X(cuGraphInstantiate, "cuGraphInstantiateWithFlags") X(cuGraphLaunch, "cuGraphLaunch")
// clang-format on

// With CUDA's own names behind it: a symbol that a header maps is found by its mapped name.
class Device {
public:
    Device() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
#define HOST_FIND(name, symbol)                                            \
    name##_ = reinterpret_cast<decltype(name##_)>(dlsym(library, symbol)); \
    if (!name##_) throw std::runtime_error("libcuda has no " symbol);
        HOST_DRIVER_FUNCTIONS(HOST_FIND)
#undef HOST_FIND
        call(cuInit_(0), "cuInit");
        CUdevice device;
        CUcontext context;
        call(cuDeviceGet_(&device, 0), "cuDeviceGet");
        call(cuDevicePrimaryCtxRetain_(&context, device), "cuDevicePrimaryCtxRetain");
        call(cuCtxSetCurrent_(context), "cuCtxSetCurrent");
        call(cuStreamCreate_(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }
    static void call(CUresult result, char const* what) {
        if (result != CUDA_SUCCESS)
            throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(result));
    }
    CUdeviceptr allocate(size_t bytes) {
        CUdeviceptr made = 0;
        if (bytes) call(cuMemAlloc_(&made, bytes), "cuMemAlloc");
        return made;
    }
    CUdeviceptr upload(std::string const& bytes) {
        CUdeviceptr const made = allocate(bytes.size());
        write(made, bytes);
        return made;
    }
    void write(CUdeviceptr to, std::string const& bytes) {
        if (!bytes.empty()) call(cuMemcpyHtoD_(to, bytes.data(), bytes.size()), "cuMemcpyHtoD");
        call(cuStreamSynchronize_(nullptr), "cuStreamSynchronize");  // ours does not wait for it
    }
    void fill(CUdeviceptr to, unsigned char value, size_t bytes) {
        if (bytes) call(cuMemsetD8_(to, value, bytes), "cuMemsetD8");
        call(cuStreamSynchronize_(nullptr), "cuStreamSynchronize");
    }
    std::string download(CUdeviceptr from, size_t bytes) {
        std::string made(bytes, '\0');
        if (bytes) call(cuMemcpyDtoH_(made.data(), from, bytes), "cuMemcpyDtoH");
        return made;
    }
    void synchronize() { call(cuStreamSynchronize_(stream), "cuStreamSynchronize"); }
    // What body queues, captured once and replayed once.
    template <typename Body>
    void throughGraph(Body&& body) {
        CUgraph graph;
        CUgraphExec executable;
        call(cuStreamBeginCapture_(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
        body();
        call(cuStreamEndCapture_(stream, &graph), "cuStreamEndCapture");
        call(cuGraphInstantiate_(&executable, graph, 0), "cuGraphInstantiate");
        call(cuGraphLaunch_(executable, stream), "cuGraphLaunch");
        synchronize();
    }

    CUstream stream{};

private:
#define HOST_MEMBER(name, symbol) decltype(&::name) name##_{};
    HOST_DRIVER_FUNCTIONS(HOST_MEMBER)
#undef HOST_MEMBER
};

}  // namespace host
