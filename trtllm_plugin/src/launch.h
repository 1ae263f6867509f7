// One layer of one step: the launches of GpuAttention.run, in its order.
#pragma once

#include "arenas.h"

namespace granikv {

// Second stream and events of one execution context; made when the plugin is attached to it.
class SideStream {
public:
    explicit SideStream(Driver const& driver);  // in the current context; throws
    ~SideStream();
    SideStream(SideStream const&) = delete;
    SideStream& operator=(SideStream const&) = delete;

    Driver const& driver;
    CUstream stream{};
    CUevent fork{};
    CUevent join{};
};

// What a step gives to the launches; pointers are on the device, null where a tensor is empty.
struct LayerStep {
    int32_t layer{};
    int32_t rows{};  // padded
    int32_t hot_grid{};
    int32_t cold_grid{};
    int32_t num_tiles{};  // of extend
    int32_t layout{};
    int32_t row_tiles{};
    bool has_runs{};
    bool has_decode{};
    float scale_log2{};
    int32_t slots_stride{};
    void const* qkv{};
    void const* rope_cos{};
    void const* rope_sin{};
    void const* request_slots{};
    void const* counts{};
    void const* row_request{};
    void const* row_position{};
    void const* slot_mapping{};
    void const* hot_items{};
    void const* hot_rows{};
    void const* cold_items{};
    void const* merge_indptr{};
    void const* merge_partials{};
    void const* qo_indptr{};
    void const* extend_indptr{};
    void const* extend_segments{};
    void const* extend_tiles{};
    void* rotated_q{};   // [rows, Hq * D]
    void* o_partials{};  // fp32 [max_partials, Hq, D]
    void* lse_partials{};
    void* out{};
};

// Queues the launches; no allocation, no synchronisation. side may be null when the layout needs
// one stream only. Throws std::runtime_error.
void launchLayer(Arenas const& arenas, LayerStep const& step, SideStream const* side,
                 CUstream stream);

}  // namespace granikv
