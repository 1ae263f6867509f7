// Plugin fields: read with errors that name field, value and range; written for serialisation.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace granikv {

struct IntField {
    char const* name;
    int64_t low;
    int64_t high;
    int32_t* value;
    bool optional = false;
};

struct FloatField {  // optional; above 0 and finite
    char const* name;
    float* value;
    bool* given;
};

// Every IntField that is not optional must be there. Throws std::invalid_argument: unknown,
// missing, repeated or out of range, of a wrong type or length.
void readFields(nvinfer1::PluginFieldCollection const* fields, std::vector<IntField> const& ints,
                std::vector<FloatField> const& floats);

// The declaration of fields that a creator returns, or the values that a plugin serialises.
class FieldList {
public:
    void addInt(char const* name, int32_t const* value);
    void addFloat(char const* name, float const* value);
    nvinfer1::PluginFieldCollection const* collection();

private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace granikv
