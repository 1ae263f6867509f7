// The table of ahead-of-time kernels: structs that granikv_cubins.h fills, and its checks.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace granikv {

// Every parameter that a kernel may have. A cubin lists its own by name; launch.cpp gives values.
// clang-format off
#define GRANIKV_PARAMETERS(X) \
    X(q_ptr, "p") X(k_ptr, "p") X(v_ptr, "p") X(q_out_ptr, "p") X(k_arena_ptr, "p") \
    X(v_arena_ptr, "p") X(out_ptr, "p") X(o_ptr, "p") X(lse_ptr, "p") X(cos_ptr, "p") \
    X(sin_ptr, "p") X(counts_ptr, "p") X(slot_mapping_ptr, "p") X(row_position_ptr, "p") \
    X(row_request_ptr, "p") X(request_slots_ptr, "p") X(hot_items_ptr, "p") X(hot_rows_ptr, "p") \
    X(cold_items_ptr, "p") X(merge_indptr_ptr, "p") X(merge_partials_ptr, "p") \
    X(extend_tiles_ptr, "p") X(qo_indptr_ptr, "p") X(extend_indptr_ptr, "p") \
    X(extend_segments_ptr, "p") X(k_stride, "i") X(v_stride, "i") X(q_stride, "i") \
    X(q_out_stride, "i") X(out_stride, "i") X(slots_stride, "i") \
    X(num_row_tiles, "i") X(scale_log2, "f") \
    X(k_desc, "pm") X(k_desc_shape0, "i") X(k_desc_shape1, "i") X(k_desc_stride0, "l") X(k_desc_stride1, "l") \
    X(v_desc, "pm") X(v_desc_shape0, "i") X(v_desc_shape1, "i") X(v_desc_stride0, "l") X(v_desc_stride1, "l") \
    X(global_scratch, "p") X(profile_scratch, "p")
// clang-format on

#define GRANIKV_ENUM(name, kinds) name,
enum class Param : uint8_t { GRANIKV_PARAMETERS(GRANIKV_ENUM) kCount };
#undef GRANIKV_ENUM

struct TensorMapSpec {
    int32_t data_type;      // CUtensorMapDataType
    int32_t element_bytes;  // 0: the kernel takes no tensor maps
    int32_t swizzle;        // CUtensorMapSwizzle
    int32_t box[2];         // tokens, elements of a row
};

struct Cubin {
    char const* kernel;
    int32_t capability;  // major * 10 + minor
    size_t offset;       // in the blob
    size_t size;
    int32_t shared_bytes;
    int32_t num_warps;
    int32_t scratch_bytes;
    int32_t scratch_align;
    char const* parameters;  // "name:kind ..."; p pointer, i int32, l int64, f float, m tensor map
    TensorMapSpec tensor_map;
};

// Indices into the cubins; -1 where the layout never launches it. [2]: dependent launch or not.
struct LayoutProgram {
    int32_t small[2];  // [has runs]
    int32_t hot[2];
    int32_t hot_gluon;   // in the place of hot; never a dependent launch
    int32_t cold[2][2];  // [has runs][dependent]
    int32_t cold_gluon;  // in the place of cold on the side stream, from so many blocks per SM on
    float gluon_blocks_per_sm;
    int32_t merge[2];
    int32_t merge_heads;  // heads of a merge block
    bool one_launch;
    bool cold_first;
};

inline constexpr int32_t kNumLayouts = 9;

struct Program {
    int32_t capability;
    int32_t num_qo_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    nvinfer1::DataType element;
    int32_t append;
    int32_t extend;
    LayoutProgram layouts[kNumLayouts];
};

struct Parameter {
    Param id;
    char kind;
};

struct Heads {
    int32_t num_qo_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    nvinfer1::DataType element;

    bool operator==(Heads const& other) const {
        return num_qo_heads == other.num_qo_heads && num_kv_heads == other.num_kv_heads &&
               head_dim == other.head_dim && element == other.element;
    }
};

char const* elementName(nvinfer1::DataType type);  // "bf16", "fp16", "fp32" or "?"
std::string describe(Heads const& heads);          // "32 query heads, 8 KV heads, ..."

// Empty when every cubin of the table can be launched by this library, else what is wrong.
std::string checkTable();

Cubin const& cubinAt(int32_t index);
void const* imageOf(Cubin const& cubin);
std::vector<Parameter> parametersOf(Cubin const& cubin);  // throws std::runtime_error

// The program for a device, or nullptr and the reason with what is built and how to rebuild.
Program const* findProgram(Heads const& heads, int32_t major, int32_t minor, int32_t shared_limit,
                           std::string& error);
// Whether any architecture has these heads; error as above.
bool isBuilt(Heads const& heads, std::string& error);
std::string buildSummary();  // source hash, Triton, architectures, heads

std::vector<int32_t> cubinsOf(Program const& program);  // distinct indices
char const* layoutName(int32_t index);

}  // namespace granikv
