// Inputs and outputs of HotColdAttention: order, names, shapes, types.
//
// Symbols: rows = rows of the step, padded; H, C = grids in items; the plan's other arrays may
// have any length that holds their contents. All tensors are linear and on the device.
#pragma once

#include <cstdint>

namespace granikv {

enum class Type { kElement, kFloat, kInt32 };  // kElement: fp16, bf16 or fp32, that of qkv

// clang-format off
//    enum name, tensor name, shape, type
#define GRANIKV_ATTENTION_INPUTS(X) \
    X(kQkv,            "qkv",             "[rows, (Hq + 2 * Hkv) * D]",        kElement) \
    X(kRopeCos,        "rope_cos",        "[max_position, D / 2]",             kFloat)   \
    X(kRopeSin,        "rope_sin",        "[max_position, D / 2]",             kFloat)   \
    X(kRequestSlots,   "request_slots",   "[max_requests + 1, max_seq_len]",   kInt32)   \
    X(kCounts,         "counts",          "[16]",                              kInt32)   \
    X(kRowRequest,     "row_request",     "[rows]",                            kInt32)   \
    X(kRowPosition,    "row_position",    "[rows]",                            kInt32)   \
    X(kSlotMapping,    "slot_mapping",    "[rows]",                            kInt32)   \
    X(kHotItems,       "hot_items",       "[H, 8]",                            kInt32)   \
    X(kHotRows,        "hot_rows",        "[hot rows]",                        kInt32)   \
    X(kColdItems,      "cold_items",      "[C, 8]",                            kInt32)   \
    X(kMergeIndptr,    "merge_indptr",    "[decode rows + 1]",                 kInt32)   \
    X(kMergePartials,  "merge_partials",  "[partials]",                        kInt32)   \
    X(kQoIndptr,       "qo_indptr",       "[extend requests + 1]",             kInt32)   \
    X(kExtendIndptr,   "extend_indptr",   "[extend requests + 1]",             kInt32)   \
    X(kExtendSegments, "extend_segments", "[segments, 8]",                     kInt32)   \
    X(kExtendTiles,    "extend_tiles",    "[tiles, 2]",                        kInt32)   \
    X(kLaunchDims,     "launch_dims",     "[0, layout, row tiles, has runs, has decode, binding]", kInt32)

#define GRANIKV_ATTENTION_OUTPUTS(X) \
    X(kOut,            "out",             "[rows, Hq * D]",                    kElement)
// clang-format on

#define GRANIKV_ENUM(name, ...) name,
enum Input : int32_t { GRANIKV_ATTENTION_INPUTS(GRANIKV_ENUM) kNumInputs };
enum Output : int32_t { GRANIKV_ATTENTION_OUTPUTS(GRANIKV_ENUM) kNumOutputs };
#undef GRANIKV_ENUM

struct TensorSpec {
    char const* name;
    char const* shape;
    Type type;
};

#define GRANIKV_SPEC(unused, name, shape, type) {name, shape, Type::type},
inline constexpr TensorSpec kInputs[] = {GRANIKV_ATTENTION_INPUTS(GRANIKV_SPEC)};
inline constexpr TensorSpec kOutputs[] = {GRANIKV_ATTENTION_OUTPUTS(GRANIKV_SPEC)};
#undef GRANIKV_SPEC

// launch_dims has no elements: host numbers reach enqueue as its dimensions.
enum LaunchDim : int32_t {
    kZero,       // always 0
    kLayout,     // index into the layouts of granikv.attention.variants
    kRowTiles,   // most row tiles of a HOT item
    kHasRuns,    // 1 when a COLD item is a RUN
    kHasDecode,  // 1 when rows are decode rows or padding
    kBinding,    // as given to granikvBindArenas
    kNumLaunchDims
};

}  // namespace granikv
