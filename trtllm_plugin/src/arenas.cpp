#include "arenas.h"

#include <cstring>
#include <mutex>
#include <stdexcept>

namespace granikv {
namespace {

std::mutex registry_mutex;
std::map<int32_t, std::shared_ptr<Arenas const>> registry;
std::map<std::pair<int32_t, Program const*>, std::shared_ptr<DeviceKernels const>> loaded;

constexpr int32_t kDefaultSharedBytes = 48 * 1024;  // more must be asked for

struct InContext {  // makes a device's primary context current
    Driver const& driver;
    InContext(Driver const& d, CUcontext context) : driver(d) {
        check(driver, driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
    }
    ~InContext() {
        CUcontext popped;
        driver.cuCtxPopCurrent(&popped);
    }
};

int32_t attributeOf(Driver const& driver, CUdevice device, CUdevice_attribute attribute) {
    int value = 0;
    check(driver, driver.cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
    return value;
}

int32_t sizeOf(char kind) { return kind == 'm' ? 128 : kind == 'p' || kind == 'l' ? 8 : 4; }

// What the cubin declares against what launch.cpp will pass.
void checkParameters(Driver const& driver, Kernel const& kernel) {
    if (!driver.cuFuncGetParamInfo) return;
    for (size_t i = 0; i <= kernel.parameters.size(); ++i) {
        size_t offset = 0, size = 0;
        CUresult const result = driver.cuFuncGetParamInfo(kernel.function, i, &offset, &size);
        bool const expected = i < kernel.parameters.size();
        size_t const want = expected ? sizeOf(kernel.parameters[i].kind) : 0;
        if ((result == CUDA_SUCCESS) != expected || (expected && size != want))
            throw std::runtime_error(std::string(kernel.cubin->kernel) + ": parameter " +
                                     std::to_string(i) + " is " + std::to_string(size) +
                                     " bytes, expected " + std::to_string(want) +
                                     "; build library and cubins from one commit");
    }
}

Kernel loadKernel(Driver const& driver, int32_t index) {
    Kernel kernel;
    kernel.cubin = &cubinAt(index);
    kernel.parameters = parametersOf(*kernel.cubin);
    CUmodule module;
    check(driver, driver.cuModuleLoadData(&module, imageOf(*kernel.cubin)), "cuModuleLoadData");
    check(driver, driver.cuModuleGetFunction(&kernel.function, module, kernel.cubin->kernel),
          "cuModuleGetFunction");
    checkParameters(driver, kernel);
    // a first launch inside a capture must not have to load it
    if (driver.cuFuncLoad) check(driver, driver.cuFuncLoad(kernel.function), "cuFuncLoad");
    if (kernel.cubin->shared_bytes > kDefaultSharedBytes) {
        check(driver, driver.cuFuncSetCacheConfig(kernel.function, CU_FUNC_CACHE_PREFER_SHARED),
              "cuFuncSetCacheConfig");
        check(driver,
              driver.cuFuncSetAttribute(kernel.function,
                                        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        kernel.cubin->shared_bytes),
              "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    }
    return kernel;
}

std::shared_ptr<DeviceKernels const> loadKernels(int32_t device, Heads const& heads) {
    std::string error;
    Driver const* driver = findDriver(error);
    if (!driver) throw std::runtime_error(error);
    CUdevice handle;
    check(*driver, driver->cuDeviceGet(&handle, device), "cuDeviceGet");
    int32_t const shared_limit =
        attributeOf(*driver, handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Program const* program = findProgram(
        heads, attributeOf(*driver, handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        attributeOf(*driver, handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), shared_limit,
        error);
    if (!program) throw std::runtime_error(error);
    auto& known = loaded[{device, program}];
    if (known) return known;
    auto made = std::make_shared<DeviceKernels>();
    made->driver = driver;
    made->program = program;
    made->device = device;
    made->num_sms = attributeOf(*driver, handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    check(*driver, driver->cuDevicePrimaryCtxRetain(&made->context, handle),
          "cuDevicePrimaryCtxRetain");
    InContext const current(*driver, made->context);
    for (int32_t index : cubinsOf(*program)) {
        Kernel kernel = loadKernel(*driver, index);
        TensorMapSpec const& wanted = kernel.cubin->tensor_map;
        if (wanted.element_bytes) {
            auto& kinds = made->map_kinds;
            size_t kind = 0;
            while (kind < kinds.size() && std::memcmp(&kinds[kind], &wanted, sizeof(wanted)))
                ++kind;
            if (kind == kinds.size()) kinds.push_back(wanted);
            kernel.map_kind = static_cast<int32_t>(kind);
        }
        made->kernels.emplace(index, std::move(kernel));
    }
    known = made;
    return made;
}

// [capacity, Hkv * D], as the kernels' descriptors are made just in time.
CUtensorMap encode(Driver const& driver, TensorMapSpec const& spec, void* base, int64_t capacity,
                   int64_t row_elements) {
    CUtensorMap map;
    cuuint64_t const sizes[2] = {static_cast<cuuint64_t>(row_elements),
                                 static_cast<cuuint64_t>(capacity)};
    cuuint64_t const strides[1] = {static_cast<cuuint64_t>(row_elements * spec.element_bytes)};
    cuuint32_t const box[2] = {static_cast<cuuint32_t>(spec.box[1]),
                               static_cast<cuuint32_t>(spec.box[0])};
    cuuint32_t const steps[2] = {1, 1};
    check(driver,
          driver.cuTensorMapEncodeTiled(
              &map, static_cast<CUtensorMapDataType>(spec.data_type), 2, base, sizes, strides, box,
              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(spec.swizzle),
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "cuTensorMapEncodeTiled");
    return map;
}

void require(bool holds, char const* name, int64_t got, char const* expected) {
    if (!holds)
        throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " +
                                    std::to_string(got));
}

}  // namespace

void bindArenas(int32_t binding, int32_t device, int32_t num_layers, int64_t const* addresses,
                int64_t capacity, Heads const& heads) {
    require(binding >= 0, "binding", binding, "0 or more");
    require(device >= 0, "device", device, "0 or more");
    require(num_layers >= 1 && num_layers <= kMaxLayers, "num_layers", num_layers,
            ("1 to " + std::to_string(kMaxLayers)).c_str());
    require(capacity >= 1 && capacity < (int64_t{1} << 31), "capacity", capacity,
            "1 to 2147483647 tokens");
    require(addresses != nullptr, "k_and_v_addresses", 0, "an array of [num_layers, 2]");
    for (int32_t i = 0; i < 2 * num_layers; ++i)
        require(addresses[i] && addresses[i] % 16 == 0, "k_and_v_addresses", addresses[i],
                "device addresses of 16-byte alignment");
    std::lock_guard<std::mutex> const lock(registry_mutex);
    if (registry.count(binding))  // replaced, the steps of who bound it would run in these arenas
        throw std::invalid_argument("binding: expected a number that is not bound, got " +
                                    std::to_string(binding) +
                                    "; take another, or call granikvUnbindArenas first");
    auto made = std::make_shared<Arenas>();
    made->kernels = loadKernels(device, heads);
    made->capacity = capacity;
    for (int32_t layer = 0; layer < num_layers; ++layer)
        made->layers.push_back({reinterpret_cast<void*>(addresses[2 * layer]),
                                reinterpret_cast<void*>(addresses[2 * layer + 1])});
    Driver const& driver = *made->kernels->driver;
    InContext const current(driver, made->kernels->context);
    int64_t const row = int64_t{heads.num_kv_heads} * heads.head_dim;
    for (TensorMapSpec const& spec : made->kernels->map_kinds) {
        auto& maps = made->maps.emplace_back();
        for (LayerArenas const& layer : made->layers)
            maps.push_back({encode(driver, spec, layer.k, capacity, row),
                            encode(driver, spec, layer.v, capacity, row)});
    }
    registry[binding] = made;
}

bool unbindArenas(int32_t binding) {
    std::lock_guard<std::mutex> const lock(registry_mutex);
    return registry.erase(binding) != 0;
}

std::shared_ptr<Arenas const> findArenas(int32_t binding) {
    std::lock_guard<std::mutex> const lock(registry_mutex);
    auto const found = registry.find(binding);
    return found == registry.end() ? nullptr : found->second;
}

}  // namespace granikv
