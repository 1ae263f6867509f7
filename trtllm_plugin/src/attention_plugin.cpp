#include "attention_plugin.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace granikv {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr double kLog2E = 1.4426950408889634;
constexpr int64_t kMaxHeads = 1024, kMaxHeadDim = 256, kMaxPartials = 1 << 24;
constexpr size_t kAlignment = 256;
constexpr int32_t kPointerAlignment = 16;  // of every pointer, as the kernels are compiled

size_t alignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t elementBytes(DataType type) { return type == DataType::kFLOAT ? 4 : 2; }

int32_t ranksOf(Input input) {
    switch (input) {
        case kQkv:
        case kRopeCos:
        case kRopeSin:
        case kRequestSlots:
        case kHotItems:
        case kColdItems:
        case kExtendSegments:
        case kExtendTiles: return 2;
        case kLaunchDims: return kNumLaunchDims;
        default: return 1;
    }
}

std::string text(nvinfer1::Dims const& dims) {
    std::string out = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) out += (i ? ", " : "") + std::to_string(dims.d[i]);
    return out + "]";
}

void require(bool holds, Input input, nvinfer1::Dims const& dims,
             std::string const& expected = "") {
    if (holds) return;
    std::string const wanted = expected.empty() ? kInputs[input].shape : expected;
    throw std::invalid_argument(std::string("input ") + kInputs[input].name + ": expected " +
                                wanted + ", got " + text(dims));
}

// TensorRT's own tensors lie on 256 bytes; nothing says so of a plugin's, and the kernels need 16.
void requireAligned(char const* kind, TensorSpec const& tensor, void const* pointer) {
    auto const address = reinterpret_cast<uintptr_t>(pointer);
    if (address % kPointerAlignment)
        throw std::invalid_argument(std::string(kind) + " " + tensor.name +
                                    ": expected an address of 16-byte alignment, got " +
                                    std::to_string(address));
}

bool isEmpty(nvinfer1::Dims const& dims) {
    return std::any_of(dims.d, dims.d + dims.nbDims, [](int64_t d) { return d == 0; });
}

bool typeFits(Type wanted, DataType type) {
    switch (wanted) {
        case Type::kElement: return isElement(type);
        case Type::kFloat: return type == DataType::kFLOAT;
        case Type::kInt32: return type == DataType::kINT32;
    }
    return false;
}

}  // namespace

AttentionPlugin::AttentionPlugin(nvinfer1::PluginFieldCollection const* fields,
                                 nvinfer1::TensorRTPhase phase)
    : PluginBase(phase) {
    readFields(fields,
               {{"layer", 0, kMaxLayers - 1, &layer_},
                {"num_qo_heads", 1, kMaxHeads, &num_qo_heads_},
                {"num_kv_heads", 1, kMaxHeads, &num_kv_heads_},
                {"head_dim", 16, kMaxHeadDim, &head_dim_},
                {"max_partials", 1, kMaxPartials, &max_partials_}},
               {{"sm_scale", &sm_scale_, &has_sm_scale_}});
    if (num_qo_heads_ % num_kv_heads_)
        throw std::invalid_argument("field num_qo_heads: expected a multiple of num_kv_heads " +
                                    std::to_string(num_kv_heads_) + ", got " +
                                    std::to_string(num_qo_heads_));
    std::string const wrong = checkTable();
    if (!wrong.empty()) throw std::runtime_error(wrong);
}

AttentionPlugin::AttentionPlugin(AttentionPlugin const& other)
    : PluginBase(other.phase_),
      layer_(other.layer_),
      num_qo_heads_(other.num_qo_heads_),
      num_kv_heads_(other.num_kv_heads_),
      head_dim_(other.head_dim_),
      max_partials_(other.max_partials_),
      sm_scale_(other.sm_scale_),
      has_sm_scale_(other.has_sm_scale_) {}

void AttentionPlugin::declareFields(FieldList& fields) {
    for (char const* name : {"layer", "num_qo_heads", "num_kv_heads", "head_dim", "max_partials"})
        fields.addInt(name, nullptr);
    fields.addFloat("sm_scale", nullptr);
}

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
    return guarded<nvinfer1::IPluginV3*>(kName, nullptr,
                                         [&] { return new AttentionPlugin(*this); });
}

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return guarded<nvinfer1::IPluginV3*>(kName, nullptr, [&]() -> nvinfer1::IPluginV3* {
        std::unique_ptr<AttentionPlugin> attached(new AttentionPlugin(*this));
        std::string error;
        Driver const* driver = building() ? nullptr : findDriver(error);
        if (driver) attached->side_ = std::make_unique<SideStream>(*driver);
        return attached.release();
    });
}

nvinfer1::PluginFieldCollection const* AttentionPlugin::getFieldsToSerialize() noexcept {
    return guarded<nvinfer1::PluginFieldCollection const*>(kName, nullptr, [&] {
        serialized_ = FieldList();
        serialized_.addInt("layer", &layer_);
        serialized_.addInt("num_qo_heads", &num_qo_heads_);
        serialized_.addInt("num_kv_heads", &num_kv_heads_);
        serialized_.addInt("head_dim", &head_dim_);
        serialized_.addInt("max_partials", &max_partials_);
        if (has_sm_scale_) serialized_.addFloat("sm_scale", &sm_scale_);
        return serialized_.collection();
    });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position,
                                                DynamicPluginTensorDesc const* tensors,
                                                int32_t num_inputs, int32_t num_outputs) noexcept {
    if (num_inputs != kNumInputs || num_outputs != kNumOutputs) return false;
    PluginTensorDesc const& tensor = tensors[position].desc;
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    if (position >= num_inputs) return tensor.type == tensors[kQkv].desc.type;
    return typeFits(kInputs[position].type, tensor.type);
}

int32_t AttentionPlugin::getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                                         nvinfer1::DimsExprs const*, int32_t,
                                         nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                                         nvinfer1::IExprBuilder& builder) noexcept {
    if (num_inputs != kNumInputs || num_outputs != kNumOutputs) {
        logError(std::string(kName) + ": expected " + std::to_string(kNumInputs) +
                 " inputs and 1 output, got " + std::to_string(num_inputs) + " and " +
                 std::to_string(num_outputs));
        return -1;
    }
    outputs[kOut].nbDims = 2;
    outputs[kOut].d[0] = inputs[kQkv].d[0];
    outputs[kOut].d[1] = builder.constant(int64_t{num_qo_heads_} * head_dim_);
    return 0;
}

int32_t AttentionPlugin::configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                                         DynamicPluginTensorDesc const*,
                                         int32_t num_outputs) noexcept {
    return guarded(kName, -1, [&] {
        if (num_inputs != kNumInputs || num_outputs != kNumOutputs)
            throw std::invalid_argument("expected " + std::to_string(kNumInputs) + " inputs, got " +
                                        std::to_string(num_inputs));
        for (int32_t i = 0; i < kNumInputs; ++i)
            require(inputs[i].desc.dims.nbDims == ranksOf(Input(i)), Input(i), inputs[i].desc.dims);
        std::string error;
        if (!isBuilt(headsOf(inputs[kQkv].desc.type), error)) throw std::invalid_argument(error);
        return 0;
    });
}

size_t AttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                                         DynamicPluginTensorDesc const*, int32_t) const noexcept {
    if (num_inputs != kNumInputs) return 0;
    return workspaceOf(inputs[kQkv].max.d[0], inputs[kQkv].desc.type).total;
}

AttentionPlugin::Workspace AttentionPlugin::workspaceOf(int64_t rows, DataType element) const {
    size_t const heads = size_t(max_partials_) * num_qo_heads_;
    Workspace made{};
    made.lse_partials = alignUp(heads * head_dim_ * sizeof(float));
    made.rotated_q = made.lse_partials + alignUp(heads * sizeof(float));
    made.total = made.rotated_q +
                 alignUp(size_t(rows) * num_qo_heads_ * head_dim_ * elementBytes(element)) +
                 kAlignment;  // TensorRT's workspace may begin anywhere
    return made;
}

Heads AttentionPlugin::headsOf(DataType element) const {
    return {num_qo_heads_, num_kv_heads_, head_dim_, element};
}

int32_t AttentionPlugin::onShapeChange(PluginTensorDesc const* inputs, int32_t num_inputs,
                                       PluginTensorDesc const*, int32_t) noexcept {
    return guarded(kName, -1, [&] {
        if (num_inputs != kNumInputs) throw std::invalid_argument("wrong number of inputs");
        checkShapes(inputs);
        return 0;
    });
}

void AttentionPlugin::checkShapes(PluginTensorDesc const* inputs) const {
    auto const dims = [&](Input input) -> nvinfer1::Dims const& { return inputs[input].dims; };
    for (int32_t i = 0; i < kNumInputs; ++i)
        require(dims(Input(i)).nbDims == ranksOf(Input(i)), Input(i), dims(Input(i)));
    int64_t const rows = dims(kQkv).d[0];
    int64_t const width = (int64_t{num_qo_heads_} + 2 * int64_t{num_kv_heads_}) * head_dim_;
    require(dims(kQkv).d[1] == width, kQkv, dims(kQkv), "[rows, " + std::to_string(width) + "]");
    for (Input rope : {kRopeCos, kRopeSin})
        require(dims(rope).d[1] == head_dim_ / 2, rope, dims(rope));
    require(dims(kCounts).d[0] == 16, kCounts, dims(kCounts));
    for (Input each : {kRowRequest, kRowPosition, kSlotMapping})
        require(dims(each).d[0] >= rows, each, dims(each),
                "at least " + std::to_string(rows) + " rows");
    for (Input items : {kHotItems, kColdItems, kExtendSegments})
        require(dims(items).d[1] == 8, items, dims(items));
    require(dims(kExtendTiles).d[1] == 2, kExtendTiles, dims(kExtendTiles));
    require(dims(kMergePartials).d[0] <= max_partials_, kMergePartials, dims(kMergePartials),
            "at most max_partials = " + std::to_string(max_partials_));
    auto const& launch = dims(kLaunchDims);
    require(launch.d[kZero] == 0 && launch.d[kLayout] < kNumLayouts && launch.d[kHasRuns] <= 1 &&
                launch.d[kHasDecode] <= 1,
            kLaunchDims, launch);
}

LayerStep AttentionPlugin::readStep(PluginTensorDesc const* descs,
                                    void const* const* inputs) const {
    auto const dim = [&](Input input, int32_t axis) { return int32_t(descs[input].dims.d[axis]); };
    LayerStep step;
    step.layer = layer_;
    step.rows = dim(kQkv, 0);
    step.hot_grid = dim(kHotItems, 0);
    step.cold_grid = dim(kColdItems, 0);
    step.num_tiles = dim(kExtendTiles, 0);
    step.layout = dim(kLaunchDims, kLayout);
    step.row_tiles = dim(kLaunchDims, kRowTiles);
    step.has_runs = dim(kLaunchDims, kHasRuns);
    step.has_decode = dim(kLaunchDims, kHasDecode);
    step.slots_stride = dim(kRequestSlots, 1);
    double const scale = has_sm_scale_ ? double{sm_scale_} : std::pow(double(head_dim_), -0.5);
    step.scale_log2 = float(scale * kLog2E);
    void const** const pointers[] = {&step.qkv,
                                     &step.rope_cos,
                                     &step.rope_sin,
                                     &step.request_slots,
                                     &step.counts,
                                     &step.row_request,
                                     &step.row_position,
                                     &step.slot_mapping,
                                     &step.hot_items,
                                     &step.hot_rows,
                                     &step.cold_items,
                                     &step.merge_indptr,
                                     &step.merge_partials,
                                     &step.qo_indptr,
                                     &step.extend_indptr,
                                     &step.extend_segments,
                                     &step.extend_tiles};
    static_assert(sizeof(pointers) / sizeof(*pointers) == kLaunchDims);
    for (int32_t i = 0; i < kLaunchDims; ++i) {
        *pointers[i] = inputs[i];
        if (!isEmpty(descs[i].dims)) requireAligned("input", kInputs[i], inputs[i]);
    }
    return step;
}

int32_t AttentionPlugin::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*,
                                 void const* const* inputs, void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
    if (building() || input_descs[kQkv].dims.d[0] == 0) return 0;
    return guarded(kName, -1, [&] {
        LayerStep step = readStep(input_descs, inputs);
        int32_t const binding = int32_t(input_descs[kLaunchDims].dims.d[kBinding]);
        std::shared_ptr<Arenas const> const arenas = findArenas(binding);
        if (!arenas)
            throw std::runtime_error(
                "launch_dims: expected a binding made with "
                "granikvBindArenas, got " +
                std::to_string(binding));
        Program const& program = *arenas->kernels->program;
        Heads const heads = headsOf(input_descs[kQkv].type);
        Heads const bound{program.num_qo_heads, program.num_kv_heads, program.head_dim,
                          program.element};
        if (!(heads == bound) || layer_ >= int32_t(arenas->layers.size()))
            throw std::runtime_error("binding " + std::to_string(binding) + ": expected layer " +
                                     std::to_string(layer_) + " of " + describe(heads) + ", got " +
                                     std::to_string(arenas->layers.size()) + " layers of " +
                                     describe(bound));
        auto const start = reinterpret_cast<uintptr_t>(workspace);
        auto* const base = reinterpret_cast<char*>(alignUp(start));
        Workspace const places = workspaceOf(step.rows, heads.element);
        step.o_partials = base + places.o_partials;
        step.lse_partials = base + places.lse_partials;
        step.rotated_q = base + places.rotated_q;
        requireAligned("output", kOutputs[kOut], outputs[kOut]);
        step.out = outputs[kOut];
        launchLayer(*arenas, step, side_.get(), stream);
        return 0;
    });
}

}  // namespace granikv
