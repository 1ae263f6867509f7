// What our two plugins share of IPluginV3: capabilities, names, one output of the first input's
// type.
#pragma once

#include <NvInferRuntime.h>

#include "fields.h"
#include "log.h"

namespace granikv {

inline constexpr char kNamespace[] = "granikv";
inline constexpr char kVersion[] = "1";

class PluginBase : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public nvinfer1::IPluginV3OneBuild,
                   public nvinfer1::IPluginV3OneRuntime {
public:
    explicit PluginBase(nvinfer1::TensorRTPhase phase) : phase_(phase) {}

    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE:
                return static_cast<nvinfer1::IPluginV3OneCore*>(this);
            case nvinfer1::PluginCapabilityType::kBUILD:
                return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME:
                return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }
    int32_t getNbOutputs() const noexcept override { return 1; }
    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs,
                               nvinfer1::DataType const* inputs,
                               int32_t num_inputs) const noexcept override {
        if (num_outputs != 1 || num_inputs < 1) return -1;
        outputs[0] = inputs[0];
        return 0;
    }

protected:
    // The builder's timing runs have undefined inputs: a plugin of that phase launches nothing.
    bool building() const { return phase_ == nvinfer1::TensorRTPhase::kBUILD; }
    nvinfer1::TensorRTPhase phase_;
};

inline bool isElement(nvinfer1::DataType type) {
    return type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16 ||
           type == nvinfer1::DataType::kFLOAT;
}

// A creator of Plugin, which has kName, Plugin(fields, phase) (throws) and declareFields.
template <typename Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    Creator() { Plugin::declareFields(fields_); }
    nvinfer1::IPluginV3* createPlugin(char const* name,
                                      nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override {
        std::string const where = std::string(Plugin::kName) + " '" + (name ? name : "") + "'";
        return guarded<nvinfer1::IPluginV3*>(where.c_str(), nullptr,
                                             [&] { return new Plugin(fields, phase); });
    }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override {
        return fields_.collection();
    }
    char const* getPluginName() const noexcept override { return Plugin::kName; }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    FieldList fields_;
};

}  // namespace granikv
