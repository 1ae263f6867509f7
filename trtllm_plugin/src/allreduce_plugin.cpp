#include "allreduce_plugin.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace granikv {
namespace {

constexpr int32_t kMaxCommunicators = 1024, kMaxRanks = 1024, kUniqueIdBytes = 128;

struct UniqueId {  // ncclUniqueId, passed by value
    char bytes[kUniqueIdBytes];
};

// The part of NCCL's stable C interface that is needed; the library is found at run time.
struct Nccl {
    int (*get_unique_id)(UniqueId*){};
    int (*init_rank)(void**, int, UniqueId, int){};
    int (*all_reduce)(void const*, void*, size_t, int, int, void*, cudaStream_t){};
    char const* (*error_string)(int){};
    std::string error;
};

enum { kNcclSum = 0, kNcclHalf = 6, kNcclFloat = 7, kNcclBf16 = 9 };

Nccl load() {
    Nccl nccl;
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        nccl.error = std::string("libnccl.so.2: expected NCCL 2.10 or later, got ") + dlerror();
        return nccl;
    }
    auto const find = [&](char const* symbol, auto& function) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
        if (!function) nccl.error = std::string("libnccl.so.2: has no ") + symbol;
    };
    find("ncclGetUniqueId", nccl.get_unique_id);
    find("ncclCommInitRank", nccl.init_rank);
    find("ncclAllReduce", nccl.all_reduce);
    find("ncclGetErrorString", nccl.error_string);
    return nccl;
}

Nccl const& nccl() {
    static Nccl const found = load();
    if (!found.error.empty()) throw std::runtime_error(found.error);
    return found;
}

void check(int result, char const* what) {
    if (result) throw std::runtime_error(std::string(what) + ": " + nccl().error_string(result));
}

struct Communicator {
    void* handle;
    int32_t tp_size;
    int32_t tp_rank;
};

std::mutex mutex;
std::map<int32_t, Communicator> communicators;

Communicator find(int32_t number) {
    std::lock_guard<std::mutex> const lock(mutex);
    auto const found = communicators.find(number);
    if (found == communicators.end())
        throw std::runtime_error(
            "communicator: expected one given to granikvSetCommunicator or "
            "granikvInitCommunicator, got " +
            std::to_string(number));
    return found->second;
}

void require(char const* name, int64_t got, int64_t low, int64_t high) {
    if (got < low || got > high)
        throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(low) +
                                    " to " + std::to_string(high) + ", got " + std::to_string(got));
}

int ncclType(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kHALF: return kNcclHalf;
        case nvinfer1::DataType::kBF16: return kNcclBf16;
        default: return kNcclFloat;
    }
}

}  // namespace

void ncclUniqueId(void* bytes, int32_t size) {
    if (!bytes)
        throw std::invalid_argument("bytes: expected room for 128, got null; give a buffer");
    if (size != kUniqueIdBytes)
        throw std::invalid_argument("size: expected 128 bytes, got " + std::to_string(size));
    check(nccl().get_unique_id(static_cast<UniqueId*>(bytes)), "ncclGetUniqueId");
}

void setCommunicator(int32_t number, void* handle, int32_t tp_size, int32_t tp_rank) {
    require("communicator", number, 0, kMaxCommunicators - 1);
    std::lock_guard<std::mutex> const lock(mutex);
    if (!handle) {
        communicators.erase(number);
        return;
    }
    require("tp_size", tp_size, 1, kMaxRanks);
    require("tp_rank", tp_rank, 0, tp_size - 1);
    communicators[number] = {handle, tp_size, tp_rank};
}

void initCommunicator(int32_t number, void const* unique_id, int32_t tp_size, int32_t tp_rank) {
    require("communicator", number, 0, kMaxCommunicators - 1);
    require("tp_size", tp_size, 1, kMaxRanks);
    require("tp_rank", tp_rank, 0, tp_size - 1);
    if (!unique_id)
        throw std::invalid_argument(
            "unique_id: expected the 128 bytes of granikvNcclUniqueId, got null; share rank 0's");
    UniqueId id;
    std::memcpy(&id, unique_id, sizeof(id));
    void* handle = nullptr;
    check(nccl().init_rank(&handle, tp_size, id, tp_rank), "ncclCommInitRank");
    setCommunicator(number, handle, tp_size, tp_rank);
}

AllReducePlugin::AllReducePlugin(nvinfer1::PluginFieldCollection const* fields,
                                 nvinfer1::TensorRTPhase phase)
    : PluginBase(phase) {
    readFields(fields,
               {{"tp_size", 1, kMaxRanks, &tp_size_},
                {"tp_rank", 0, kMaxRanks - 1, &tp_rank_},
                {"communicator", 0, kMaxCommunicators - 1, &communicator_, true}},
               {});
    if (tp_rank_ >= tp_size_)
        throw std::invalid_argument("field tp_rank: expected 0 to " + std::to_string(tp_size_ - 1) +
                                    ", got " + std::to_string(tp_rank_));
}

AllReducePlugin::AllReducePlugin(AllReducePlugin const& other)
    : PluginBase(other.phase_),
      tp_size_(other.tp_size_),
      tp_rank_(other.tp_rank_),
      communicator_(other.communicator_) {}

void AllReducePlugin::declareFields(FieldList& fields) {
    for (char const* name : {"tp_size", "tp_rank", "communicator"}) fields.addInt(name, nullptr);
}

nvinfer1::IPluginV3* AllReducePlugin::clone() noexcept {
    return guarded<nvinfer1::IPluginV3*>(kName, nullptr,
                                         [&] { return new AllReducePlugin(*this); });
}

nvinfer1::PluginFieldCollection const* AllReducePlugin::getFieldsToSerialize() noexcept {
    return guarded<nvinfer1::PluginFieldCollection const*>(kName, nullptr, [&] {
        serialized_ = FieldList();
        serialized_.addInt("tp_size", &tp_size_);
        serialized_.addInt("tp_rank", &tp_rank_);
        serialized_.addInt("communicator", &communicator_);
        return serialized_.collection();
    });
}

bool AllReducePlugin::supportsFormatCombination(int32_t position,
                                                nvinfer1::DynamicPluginTensorDesc const* tensors,
                                                int32_t num_inputs, int32_t num_outputs) noexcept {
    if (num_inputs != 1 || num_outputs != 1) return false;
    nvinfer1::PluginTensorDesc const& tensor = tensors[position].desc;
    return tensor.format == nvinfer1::TensorFormat::kLINEAR && isElement(tensor.type) &&
           tensor.type == tensors[0].desc.type;
}

int32_t AllReducePlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                                         nvinfer1::DimsExprs const*, int32_t,
                                         nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                                         nvinfer1::IExprBuilder&) noexcept {
    if (num_inputs != 1 || num_outputs != 1) {
        logError(std::string(kName) + ": expected 1 input and 1 output, got " +
                 std::to_string(num_inputs) + " and " + std::to_string(num_outputs));
        return -1;
    }
    outputs[0] = inputs[0];
    return 0;
}

int32_t AllReducePlugin::enqueue(nvinfer1::PluginTensorDesc const* input_descs,
                                 nvinfer1::PluginTensorDesc const*, void const* const* inputs,
                                 void* const* outputs, void*, cudaStream_t stream) noexcept {
    nvinfer1::Dims const& dims = input_descs[0].dims;
    size_t count = 1;
    for (int32_t i = 0; i < dims.nbDims; ++i) count *= size_t(dims.d[i]);
    if (building() || count == 0) return 0;
    return guarded(kName, -1, [&] {
        Communicator const found = find(communicator_);
        if (found.tp_size != tp_size_ || found.tp_rank != tp_rank_)
            throw std::runtime_error(
                "communicator: expected rank " + std::to_string(tp_rank_) + " of " +
                std::to_string(tp_size_) + " as the engine was built for, got rank " +
                std::to_string(found.tp_rank) + " of " + std::to_string(found.tp_size));
        check(nccl().all_reduce(inputs[0], outputs[0], count, ncclType(input_descs[0].type),
                                kNcclSum, found.handle, stream),
              "ncclAllReduce");
        return 0;
    });
}

}  // namespace granikv
