// A libcuda.so.1 without a GPU: memory is host memory, and launches are written down, not run.
//
// FAKE_CUDA_TRACE    file that gets one line per call of interest
// FAKE_CUDA_KERNELS  file of lines "checksum size size ...": a cubin's bytes * 2^32 + Adler-32, and
//                    the bytes of each of its parameters
// FAKE_CUDA_CAPABILITY (90), FAKE_CUDA_SHARED (232448), FAKE_CUDA_SMS (132), FAKE_CUDA_REFUSE (name
// of a kernel whose launch fails)

#include <cuda.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Function {
    uint64_t hash;
    std::string name;
    std::vector<size_t> sizes;
    int shared = 48 * 1024;
    bool loaded = false;  // a launch inside a capture cannot load it
};

int next_handle = 1;

std::string setting(char const* name, char const* otherwise) {
    char const* value = std::getenv(name);
    return value ? value : otherwise;
}

void trace(std::string const& line) {
    std::ofstream(setting("FAKE_CUDA_TRACE", "/dev/null"), std::ios::app) << line << '\n';
}

std::string hex(void const* bytes, size_t size) {
    std::string text;
    char two[3];
    for (size_t i = 0; i < size; ++i) {
        std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char const*>(bytes)[i]);
        text += two;
    }
    return text;
}

uint64_t checksumOf(unsigned char const* image) {
    auto const* elf = reinterpret_cast<Elf64_Ehdr const*>(image);
    size_t end = elf->e_phoff + size_t(elf->e_phnum) * elf->e_phentsize;
    end = std::max(end, elf->e_shoff + size_t(elf->e_shnum) * elf->e_shentsize);
    uint64_t low = 1, high = 0;
    for (size_t i = 0; i < end; ++i) {
        low = (low + image[i]) % 65521;
        high = (high + low) % 65521;
    }
    return uint64_t(end) << 32 | high << 16 | low;
}

std::vector<size_t> const* sizesOf(uint64_t hash) {
    static std::map<uint64_t, std::vector<size_t>> const known = [] {
        std::map<uint64_t, std::vector<size_t>> found;
        std::ifstream lines(setting("FAKE_CUDA_KERNELS", ""));
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            uint64_t key;
            words >> key;
            for (size_t size; words >> size;) found[key].push_back(size);
        }
        return found;
    }();
    auto const found = known.find(hash);
    return found == known.end() ? nullptr : &found->second;
}

}  // namespace

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult result, char const** text) {
    *text = result == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "a fake error";
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    int const capability = std::stoi(setting("FAKE_CUDA_CAPABILITY", "90"));
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = std::stoi(setting("FAKE_CUDA_SHARED", "232448"));
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            *value = std::stoi(setting("FAKE_CUDA_SMS", "132"));
            break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = reinterpret_cast<CUcontext>(8);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext*) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleLoadData(CUmodule* module, void const* image) {
    uint64_t const hash = checksumOf(static_cast<unsigned char const*>(image));
    *module = reinterpret_cast<CUmodule>(hash);
    return sizesOf(hash) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, char const* name) {
    auto const hash = reinterpret_cast<uint64_t>(module);
    *function = reinterpret_cast<CUfunction>(new Function{hash, name, *sizesOf(hash)});
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncLoad(CUfunction function) {
    reinterpret_cast<Function*>(function)->loaded = true;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset,
                                   size_t* size) {
    auto const& sizes = reinterpret_cast<Function*>(function)->sizes;
    if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *size = sizes[index];
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int value) {
    reinterpret_cast<Function*>(function)->shared = value;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernelEx(CUlaunchConfig const* config, CUfunction handle, void** parameters,
                                 void**) {
    auto const& function = *reinterpret_cast<Function*>(handle);
    if (!config->gridDimX || !config->gridDimY || int(config->sharedMemBytes) > function.shared)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function.loaded) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (function.name == setting("FAKE_CUDA_REFUSE", "")) return CUDA_ERROR_LAUNCH_FAILED;
    std::ostringstream line;
    line << "launch " << function.hash << ' ' << function.name << ' ' << config->gridDimX << ' '
         << config->gridDimY << ' ' << config->blockDimX << ' ' << config->sharedMemBytes << ' '
         << reinterpret_cast<uintptr_t>(config->hStream) << ' ' << config->numAttrs;
    for (size_t i = 0; i < function.sizes.size(); ++i)
        line << ' ' << hex(parameters[i], function.sizes[i]);
    trace(line.str());
    return CUDA_SUCCESS;
}

// base, sizes[2], strides[1], box[2], data type, swizzle: what a test wants to see of a map
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* base, cuuint64_t const* sizes,
                                       cuuint64_t const* strides, cuuint32_t const* box,
                                       cuuint32_t const*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
    if (rank != 2) return CUDA_ERROR_INVALID_VALUE;
    uint64_t const said[] = {reinterpret_cast<uint64_t>(base),
                             sizes[0],
                             sizes[1],
                             strides[0],
                             box[0],
                             box[1],
                             uint64_t(type),
                             uint64_t(swizzle)};
    std::memset(map, 0, sizeof(*map));
    std::memcpy(map, said, sizeof(said));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) {
    *stream = reinterpret_cast<CUstream>(uintptr_t(next_handle++));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy_v2(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuEventCreate(CUevent* event, unsigned) {
    *event = reinterpret_cast<CUevent>(uintptr_t(next_handle++));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy_v2(CUevent) { return CUDA_SUCCESS; }
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    trace("record " + std::to_string(reinterpret_cast<uintptr_t>(event)) + ' ' +
          std::to_string(reinterpret_cast<uintptr_t>(stream)));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    trace("wait " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + ' ' +
          std::to_string(reinterpret_cast<uintptr_t>(event)));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) {
    trace("capture");
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamEndCapture(CUstream, CUgraph*) { return CUDA_SUCCESS; }
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphLaunch(CUgraphExec, CUstream) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* made, size_t bytes) {
    *made = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    trace("alloc " + std::to_string(*made) + ' ' + std::to_string(bytes));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, void const* from, size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return CUDA_SUCCESS;
}
