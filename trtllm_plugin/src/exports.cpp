// What the library exports: TensorRT's entry points, and C functions for arenas and communicators.
//
// The C functions return 0, or -1 with the reason in granikvLastError().

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "allreduce_plugin.h"
#include "arenas.h"
#include "attention_plugin.h"

#define GRANIKV_EXPORT extern "C" __attribute__((visibility("default")))

namespace granikv {
namespace {

nvinfer1::IPluginCreatorInterface* const* creators(int32_t& count) {
    static Creator<AttentionPlugin> attention;
    static Creator<AllReducePlugin> all_reduce;
    static nvinfer1::IPluginCreatorInterface* const list[] = {&attention, &all_reduce};
    count = 2;
    return list;
}

// TensorRT is not linked: any of its libraries that the process has loaded will do.
nvinfer1::IPluginRegistry* findRegistry() {
    using Get = nvinfer1::IPluginRegistry* (*)();
    auto get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "getPluginRegistry"));
    for (char const* name : {"libnvinfer.so.10", "libnvinfer.so.11", "libtensorrt_rtx.so.1"}) {
        if (get) break;
        if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
            get = reinterpret_cast<Get>(dlsym(library, "getPluginRegistry"));
    }
    return get ? get() : nullptr;
}

nvinfer1::DataType elementOf(char const* name) {
    using nvinfer1::DataType;
    for (DataType type : {DataType::kBF16, DataType::kHALF, DataType::kFLOAT})
        if (name && !std::strcmp(name, elementName(type))) return type;
    throw std::invalid_argument(std::string("element: expected bf16, fp16 or fp32, got ") +
                                (name ? name : "nothing"));
}

}  // namespace
}  // namespace granikv

using namespace granikv;

GRANIKV_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    return creators(count);
}

GRANIKV_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    granikv::setLoggerFinder(finder);
}

// For a library that was loaded with ctypes or dlopen; logger: nvinfer1::ILogger*, may be null.
GRANIKV_EXPORT bool initGraniKVPlugins(void* logger, char const* plugin_namespace) {
    return guarded("initGraniKVPlugins", false, [&] {
        if (logger) setLogger(static_cast<nvinfer1::ILogger*>(logger));
        std::string const wrong = checkTable();
        if (!wrong.empty()) throw std::runtime_error(wrong);
        nvinfer1::IPluginRegistry* registry = findRegistry();
        if (!registry)
            throw std::runtime_error(
                "plugin registry: expected a loaded libnvinfer or "
                "libtensorrt_rtx, got none; load TensorRT first");
        char const* name = plugin_namespace && *plugin_namespace ? plugin_namespace : kNamespace;
        int32_t count = 0;
        auto const* list = creators(count);
        for (int32_t i = 0; i < count; ++i)
            if (!registry->registerCreator(*list[i], name))
                throw std::runtime_error("registerCreator: refused; registered already?");
        return true;
    });
}

// K and V addresses [num_layers, 2] of arenas [capacity, Hkv, D] on the device. Loads the kernels
// and encodes the tensor maps; call it before the first step that names the binding.
GRANIKV_EXPORT int32_t granikvBindArenas(int32_t binding, int32_t device, int32_t num_layers,
                                         int64_t const* k_and_v_addresses, int64_t capacity,
                                         int32_t num_qo_heads, int32_t num_kv_heads,
                                         int32_t head_dim, char const* element) {
    return guarded("granikvBindArenas", -1, [&] {
        bindArenas(binding, device, num_layers, k_and_v_addresses, capacity,
                   {num_qo_heads, num_kv_heads, head_dim, elementOf(element)});
        return 0;
    });
}

// After the last step that named the binding has finished.
GRANIKV_EXPORT int32_t granikvUnbindArenas(int32_t binding) {
    return guarded("granikvUnbindArenas", -1, [&] {
        if (!unbindArenas(binding))
            throw std::invalid_argument("binding: expected a bound one, got " +
                                        std::to_string(binding));
        return 0;
    });
}

GRANIKV_EXPORT int32_t granikvNcclUniqueId(void* bytes, int32_t size) {
    return guarded("granikvNcclUniqueId", -1, [&] { return ncclUniqueId(bytes, size), 0; });
}

// communicator: an ncclComm_t that the caller owns; null removes the number.
GRANIKV_EXPORT int32_t granikvSetCommunicator(int32_t number, void* communicator, int32_t tp_size,
                                              int32_t tp_rank) {
    return guarded("granikvSetCommunicator", -1,
                   [&] { return setCommunicator(number, communicator, tp_size, tp_rank), 0; });
}

// Makes the communicator on the current device; every rank calls it at once with one unique id.
GRANIKV_EXPORT int32_t granikvInitCommunicator(int32_t number, void const* unique_id,
                                               int32_t tp_size, int32_t tp_rank) {
    return guarded("granikvInitCommunicator", -1,
                   [&] { return initCommunicator(number, unique_id, tp_size, tp_rank), 0; });
}

GRANIKV_EXPORT char const* granikvLastError() { return lastError(); }

GRANIKV_EXPORT char const* granikvBuildSummary() {
    static std::string const summary = buildSummary();
    return summary.c_str();
}

// Empty, or what is wrong with the library's kernels.
GRANIKV_EXPORT char const* granikvCheckTable() {
    static std::string const wrong = checkTable();
    return wrong.c_str();
}
