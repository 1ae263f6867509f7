#include "launch.h"

#include <stdexcept>

namespace granikv {
namespace {

union Value {
    void const* pointer;
    int32_t i32;
    int64_t i64;
    float f32;
};

// Values of all parameters of a layer's kernels; a launch picks those that its cubin lists.
class Arguments {
public:
    Arguments(Arenas const& arenas, LayerStep const& step) {
        Program const& program = *arenas.kernels->program;
        int32_t const q_width = program.num_qo_heads * program.head_dim;
        int32_t const kv_width = program.num_kv_heads * program.head_dim;
        LayerArenas const& layer = arenas.layers[step.layer];
        pointer(Param::q_ptr, step.rotated_q);
        pointer(Param::k_ptr, layer.k);
        pointer(Param::v_ptr, layer.v);
        pointer(Param::k_desc, layer.k);
        pointer(Param::v_desc, layer.v);
        pointer(Param::q_out_ptr, step.rotated_q);
        pointer(Param::k_arena_ptr, layer.k);
        pointer(Param::v_arena_ptr, layer.v);
        pointer(Param::out_ptr, step.out);
        pointer(Param::o_ptr, step.o_partials);
        pointer(Param::lse_ptr, step.lse_partials);
        pointer(Param::cos_ptr, step.rope_cos);
        pointer(Param::sin_ptr, step.rope_sin);
        pointer(Param::counts_ptr, step.counts);
        pointer(Param::slot_mapping_ptr, step.slot_mapping);
        pointer(Param::row_position_ptr, step.row_position);
        pointer(Param::row_request_ptr, step.row_request);
        pointer(Param::request_slots_ptr, step.request_slots);
        pointer(Param::hot_items_ptr, step.hot_items);
        pointer(Param::hot_rows_ptr, step.hot_rows);
        pointer(Param::cold_items_ptr, step.cold_items);
        pointer(Param::merge_indptr_ptr, step.merge_indptr);
        pointer(Param::merge_partials_ptr, step.merge_partials);
        pointer(Param::extend_tiles_ptr, step.extend_tiles);
        pointer(Param::qo_indptr_ptr, step.qo_indptr);
        pointer(Param::extend_indptr_ptr, step.extend_indptr);
        pointer(Param::extend_segments_ptr, step.extend_segments);
        pointer(Param::global_scratch, nullptr);
        pointer(Param::profile_scratch, nullptr);
        integer(Param::q_stride, q_width);
        integer(Param::q_out_stride, q_width);
        integer(Param::out_stride, q_width);
        integer(Param::slots_stride, step.slots_stride);
        integer(Param::num_row_tiles, step.row_tiles);
        at(Param::scale_log2).f32 = step.scale_log2;
        for (Param shape : {Param::k_desc_shape0, Param::v_desc_shape0})
            integer(shape, static_cast<int32_t>(arenas.capacity));
        for (Param shape : {Param::k_desc_shape1, Param::v_desc_shape1}) integer(shape, kv_width);
        for (Param stride : {Param::k_desc_stride0, Param::v_desc_stride0})
            at(stride).i64 = kv_width;
        for (Param stride : {Param::k_desc_stride1, Param::v_desc_stride1}) at(stride).i64 = 1;
    }

    // The packed rows that append reads: q, then k, then v.
    void readPacked(LayerStep const& step, Program const& program) {
        int32_t const q_width = program.num_qo_heads * program.head_dim;
        int32_t const kv_width = program.num_kv_heads * program.head_dim;
        int64_t const bytes = program.element == nvinfer1::DataType::kFLOAT ? 4 : 2;
        auto const* row = static_cast<char const*>(step.qkv);
        pointer(Param::q_ptr, row);
        pointer(Param::k_ptr, row + q_width * bytes);
        pointer(Param::v_ptr, row + (q_width + kv_width) * bytes);
        for (Param stride : {Param::q_stride, Param::k_stride, Param::v_stride})
            integer(stride, q_width + 2 * kv_width);
    }

    void pointer(Param id, void const* value) { at(id).pointer = value; }
    void integer(Param id, int32_t value) { at(id).i32 = value; }
    Value& at(Param id) { return values_[static_cast<size_t>(id)]; }

private:
    Value values_[static_cast<size_t>(Param::kCount)] = {};
};

constexpr int32_t kFirstWithDependentLaunches = 90;  // compute capability

class Layer {
public:
    Layer(Arenas const& arenas, LayerStep const& step, SideStream const* side, CUstream stream)
        : arenas_(arenas),
          kernels_(*arenas.kernels),
          program_(*kernels_.program),
          layout_(program_.layouts[step.layout]),
          step_(step),
          side_(side),
          stream_(stream),
          arguments_(arenas, step) {}

    void run() {
        Arguments packed(arenas_, step_);
        packed.readPacked(step_, program_);
        launch(program_.append, packed, step_.rows, 1, stream_,
               program_.capability >= kFirstWithDependentLaunches);
        if (step_.has_decode) decode();
        if (step_.num_tiles)
            launch(program_.extend, arguments_, step_.num_tiles * heads(), 1, stream_, false);
    }

private:
    int32_t heads() const { return program_.num_kv_heads; }

    void decode() {
        bool const both = step_.hot_grid && step_.cold_grid;
        bool const one_stream = layout_.one_launch || !both;
        bool const dependent = one_stream && layout_.merge[1] >= 0;  // [1]: from sm_90 on
        if (layout_.one_launch && step_.hot_grid) {
            int32_t const items = step_.hot_grid * step_.row_tiles + step_.cold_grid;
            launch(layout_.small[step_.has_runs], arguments_, items * heads(), 1, stream_,
                   dependent);
        } else if (one_stream) {
            hot(dependent);
            cold(dependent, stream_);
        } else {
            twoStreams();
        }
        int32_t const blocks =
            (program_.num_qo_heads + layout_.merge_heads - 1) / layout_.merge_heads;
        launch(layout_.merge[dependent], arguments_, step_.rows, blocks, stream_, dependent);
    }

    void twoStreams() {
        if (!side_) throw std::runtime_error("two streams needed, but attached to no context");
        Driver const& driver = *kernels_.driver;
        check(driver, driver.cuEventRecord(side_->fork, stream_), "cuEventRecord");
        check(driver, driver.cuStreamWaitEvent(side_->stream, side_->fork, 0), "cuStreamWaitEvent");
        // a failed launch must not leave the side stream forked: a capture could never end
        std::string error;
        auto const attempt = [&](auto&& body) {
            try {
                if (error.empty()) body();
            } catch (std::exception const& e) {
                error = e.what();
            }
        };
        if (!layout_.cold_first) attempt([&] { hot(false); });
        attempt([&] { coldBesideHot(); });
        check(driver, driver.cuEventRecord(side_->join, side_->stream), "cuEventRecord");
        if (layout_.cold_first) attempt([&] { hot(false); });
        check(driver, driver.cuStreamWaitEvent(stream_, side_->join, 0), "cuStreamWaitEvent");
        if (!error.empty()) throw std::runtime_error(error);
    }

    void hot(bool dependent) {
        if (!step_.hot_grid) return;
        int32_t const blocks = step_.hot_grid * heads();
        if (layout_.hot_gluon >= 0) {  // its items have one row tile and at least a block of tokens
            launch(layout_.hot_gluon, arguments_, blocks, 1, stream_, false);
            return;
        }
        launch(layout_.hot[dependent], arguments_, blocks, step_.row_tiles, stream_, dependent);
    }

    void cold(bool dependent, CUstream stream) {
        if (!step_.cold_grid) return;
        launch(layout_.cold[step_.has_runs][dependent], arguments_, step_.cold_grid * heads(), 1,
               stream, dependent);
    }

    void coldBesideHot() {
        int32_t const blocks = step_.cold_grid * heads();
        if (layout_.cold_gluon < 0 || blocks < layout_.gluon_blocks_per_sm * kernels_.num_sms)
            cold(false, side_->stream);
        else
            launch(layout_.cold_gluon, arguments_, blocks, 1, side_->stream, false);
    }

    void launch(int32_t cubin, Arguments& arguments, int32_t grid_x, int32_t grid_y,
                CUstream stream, bool dependent) {
        auto const found = kernels_.kernels.find(cubin);
        if (found == kernels_.kernels.end())
            throw std::runtime_error(std::string("layout ") + layoutName(step_.layout) +
                                     ": has no kernel for this plan");
        Kernel const& kernel = found->second;
        void* parameters[static_cast<size_t>(Param::kCount)];
        for (size_t i = 0; i < kernel.parameters.size(); ++i) {
            Parameter const& parameter = kernel.parameters[i];
            bool const is_v = parameter.id == Param::v_desc;
            parameters[i] =
                parameter.kind == 'm' ? mapOf(kernel, is_v) : &arguments.at(parameter.id);
        }
        CUlaunchAttribute attribute{};
        attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        CUlaunchConfig config{};
        config.gridDimX = grid_x;
        config.gridDimY = grid_y;
        config.gridDimZ = 1;
        config.blockDimX = 32 * kernel.cubin->num_warps;
        config.blockDimY = config.blockDimZ = 1;
        config.sharedMemBytes = kernel.cubin->shared_bytes;
        config.hStream = stream;
        config.attrs = &attribute;
        config.numAttrs = dependent ? 1 : 0;
        check(*kernels_.driver,
              kernels_.driver->cuLaunchKernelEx(&config, kernel.function, parameters, nullptr),
              kernel.cubin->kernel);
    }

    void* mapOf(Kernel const& kernel, bool is_v) const {
        return const_cast<CUtensorMap*>(&arenas_.maps[kernel.map_kind][step_.layer][is_v]);
    }

    Arenas const& arenas_;
    DeviceKernels const& kernels_;
    Program const& program_;
    LayoutProgram const& layout_;
    LayerStep const& step_;
    SideStream const* side_;
    CUstream stream_;
    Arguments arguments_;
};

}  // namespace

SideStream::SideStream(Driver const& d) : driver(d) {
    check(driver, driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(driver, driver.cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    check(driver, driver.cuEventCreate(&join, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

SideStream::~SideStream() {
    if (fork) driver.cuEventDestroy(fork);
    if (join) driver.cuEventDestroy(join);
    if (stream) driver.cuStreamDestroy(stream);
}

void launchLayer(Arenas const& arenas, LayerStep const& step, SideStream const* side,
                 CUstream stream) {
    Layer(arenas, step, side, stream).run();
}

}  // namespace granikv
