// AllReduce: the sum over tensor-parallel ranks with NCCL, for TensorRT before 10.16.
#pragma once

#include "plugin_base.h"

namespace granikv {

// Communicators of this process by number; setting nullptr removes one. Throws std::runtime_error.
void ncclUniqueId(void* bytes, int32_t size);  // size: 128
void setCommunicator(int32_t number, void* communicator, int32_t tp_size, int32_t tp_rank);
void initCommunicator(int32_t number, void const* unique_id, int32_t tp_size, int32_t tp_rank);

class AllReducePlugin final : public PluginBase {
public:
    static constexpr char kName[] = "AllReduce";

    AllReducePlugin(nvinfer1::PluginFieldCollection const* fields, nvinfer1::TensorRTPhase phase);
    static void declareFields(FieldList& fields);

    char const* getPluginName() const noexcept override { return kName; }
    nvinfer1::IPluginV3* clone() noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
        return clone();
    }
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;
    bool supportsFormatCombination(int32_t position,
                                   nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                            nvinfer1::DimsExprs const*, int32_t, nvinfer1::DimsExprs* outputs,
                            int32_t num_outputs, nvinfer1::IExprBuilder&) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t,
                            nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const*, int32_t,
                          nvinfer1::PluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs,
                    nvinfer1::PluginTensorDesc const*, void const* const* inputs,
                    void* const* outputs, void*, cudaStream_t stream) noexcept override;

private:
    AllReducePlugin(AllReducePlugin const& other);

    int32_t tp_size_{}, tp_rank_{};
    int32_t communicator_{0};  // number, as given to granikvInitCommunicator
    FieldList serialized_;
};

}  // namespace granikv
