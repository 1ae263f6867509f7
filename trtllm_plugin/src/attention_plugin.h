// HotColdAttention: rope, append, HOT, COLD, merge and extend of one layer as one TensorRT node.
#pragma once

#include <memory>

#include "launch.h"
#include "plugin_base.h"
#include "plugin_io.h"

namespace granikv {

class AttentionPlugin final : public PluginBase {
public:
    static constexpr char kName[] = "HotColdAttention";

    AttentionPlugin(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase);
    static void declareFields(FieldList& fields);

    char const* getPluginName() const noexcept override { return kName; }
    nvinfer1::IPluginV3* clone() noexcept override;
    nvinfer1::IPluginV3* attachToContext(
        nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

    bool supportsFormatCombination(int32_t position,
                                   nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                            nvinfer1::DimsExprs const* shape_inputs, int32_t num_shape_inputs,
                            nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const* outputs,
                            int32_t num_outputs) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const* outputs,
                            int32_t num_outputs) const noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t num_inputs,
                          nvinfer1::PluginTensorDesc const* outputs,
                          int32_t num_outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs,
                    nvinfer1::PluginTensorDesc const* output_descs, void const* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

private:
    AttentionPlugin(AttentionPlugin const& other);

    struct Workspace {  // offsets in bytes from an aligned base
        size_t o_partials, lse_partials, rotated_q, total;
    };
    Workspace workspaceOf(int64_t rows, nvinfer1::DataType element) const;
    Heads headsOf(nvinfer1::DataType element) const;
    void checkShapes(nvinfer1::PluginTensorDesc const* inputs) const;  // throws
    LayerStep readStep(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs) const;

    int32_t layer_{}, num_qo_heads_{}, num_kv_heads_{}, head_dim_{}, max_partials_{};
    float sm_scale_{};
    bool has_sm_scale_{};  // else 1 / sqrt(head_dim)
    FieldList serialized_;
    std::unique_ptr<SideStream> side_;  // of the context that this is attached to
};

}  // namespace granikv
