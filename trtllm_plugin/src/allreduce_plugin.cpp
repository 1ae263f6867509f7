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
    int32_t num_ranks;
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

int ncclType(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kHALF: return kNcclHalf;
        case nvinfer1::DataType::kBF16: return kNcclBf16;
        default: return kNcclFloat;
    }
}

}  // namespace

void ncclUniqueId(void* bytes, int32_t size) {
    if (!bytes || size != kUniqueIdBytes)
        throw std::invalid_argument("size: expected 128 bytes, got " + std::to_string(size));
    check(nccl().get_unique_id(static_cast<UniqueId*>(bytes)), "ncclGetUniqueId");
}

void setCommunicator(int32_t number, void* handle, int32_t num_ranks) {
    if (number < 0 || number >= kMaxCommunicators)
        throw std::invalid_argument("communicator: expected 0 to 1023, got " +
                                    std::to_string(number));
    std::lock_guard<std::mutex> const lock(mutex);
    if (!handle) {
        communicators.erase(number);
        return;
    }
    if (num_ranks < 1 || num_ranks > kMaxRanks)
        throw std::invalid_argument("num_ranks: expected 1 to 1024, got " +
                                    std::to_string(num_ranks));
    communicators[number] = {handle, num_ranks};
}

void initCommunicator(int32_t number, void const* unique_id, int32_t num_ranks, int32_t rank) {
    if (rank < 0 || rank >= num_ranks)
        throw std::invalid_argument("rank: expected 0 to " + std::to_string(num_ranks - 1) +
                                    ", got " + std::to_string(rank));
    UniqueId id;
    std::memcpy(&id, unique_id, sizeof(id));
    void* handle = nullptr;
    check(nccl().init_rank(&handle, num_ranks, id, rank), "ncclCommInitRank");
    setCommunicator(number, handle, num_ranks);
}

AllReducePlugin::AllReducePlugin(nvinfer1::PluginFieldCollection const* fields,
                                 nvinfer1::TensorRTPhase phase)
    : PluginBase(phase) {
    readFields(fields,
               {{"communicator", 0, kMaxCommunicators - 1, &communicator_},
                {"num_ranks", 1, kMaxRanks, &num_ranks_}},
               {});
}

AllReducePlugin::AllReducePlugin(AllReducePlugin const& other)
    : PluginBase(other.phase_), communicator_(other.communicator_), num_ranks_(other.num_ranks_) {}

void AllReducePlugin::declareFields(FieldList& fields) {
    fields.addInt("communicator", nullptr);
    fields.addInt("num_ranks", nullptr);
}

nvinfer1::IPluginV3* AllReducePlugin::clone() noexcept {
    return guarded<nvinfer1::IPluginV3*>(kName, nullptr,
                                         [&] { return new AllReducePlugin(*this); });
}

nvinfer1::PluginFieldCollection const* AllReducePlugin::getFieldsToSerialize() noexcept {
    return guarded<nvinfer1::PluginFieldCollection const*>(kName, nullptr, [&] {
        serialized_ = FieldList();
        serialized_.addInt("communicator", &communicator_);
        serialized_.addInt("num_ranks", &num_ranks_);
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
        if (found.num_ranks != num_ranks_)
            throw std::runtime_error("num_ranks: expected " + std::to_string(num_ranks_) +
                                     " as the engine was built for, got a communicator of " +
                                     std::to_string(found.num_ranks));
        check(nccl().all_reduce(inputs[0], outputs[0], count, ncclType(input_descs[0].type),
                                kNcclSum, found.handle, stream),
              "ncclAllReduce");
        return 0;
    });
}

}  // namespace granikv
