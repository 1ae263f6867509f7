#include "fields.h"

#include <cmath>
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>

namespace granikv {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

[[noreturn]] void fail(std::string const& field, std::string const& expected,
                       std::string const& got) {
    throw std::invalid_argument("field " + field + ": expected " + expected + ", got " + got);
}

std::string typeName(PluginFieldType type) {
    return "PluginFieldType " + std::to_string(static_cast<int32_t>(type));
}

int64_t intOf(PluginField const& field) {
    if (field.length != 1 || !field.data)
        fail(field.name, "one integer", std::to_string(field.length) + " values");
    if (field.type == PluginFieldType::kINT32) return *static_cast<int32_t const*>(field.data);
    if (field.type == PluginFieldType::kINT64) return *static_cast<int64_t const*>(field.data);
    fail(field.name, "an int32 or int64", typeName(field.type));
}

float floatOf(PluginField const& field) {
    if (field.length != 1 || !field.data)
        fail(field.name, "one float", std::to_string(field.length) + " values");
    if (field.type != PluginFieldType::kFLOAT32)
        fail(field.name, "a float32", typeName(field.type));
    return *static_cast<float const*>(field.data);
}

// What the ONNX parser adds of its own.
bool isParsers(char const* name) {
    for (char const* known :
         {"plugin_version", "plugin_namespace", "plugin_name", "name", "version"})
        if (!std::strcmp(name, known)) return true;
    return false;
}

}  // namespace

void readFields(nvinfer1::PluginFieldCollection const* fields, std::vector<IntField> const& ints,
                std::vector<FloatField> const& floats) {
    std::set<std::string> seen;
    int32_t const count = fields ? fields->nbFields : 0;
    for (int32_t i = 0; i < count; ++i) {
        PluginField const& field = fields->fields[i];
        if (!field.name || isParsers(field.name)) continue;
        if (!seen.insert(field.name).second) fail(field.name, "one value", "the field twice");
        bool known = false;
        for (IntField const& wanted : ints) {
            if (std::strcmp(field.name, wanted.name)) continue;
            known = true;
            int64_t const value = intOf(field);
            if (value < wanted.low || value > wanted.high)
                fail(field.name, std::to_string(wanted.low) + " to " + std::to_string(wanted.high),
                     std::to_string(value));
            *wanted.value = static_cast<int32_t>(value);
        }
        for (FloatField const& wanted : floats) {
            if (std::strcmp(field.name, wanted.name)) continue;
            known = true;
            float const value = floatOf(field);
            if (!(value > 0.0f) || !std::isfinite(value))
                fail(field.name, "a finite number above 0", std::to_string(value));
            *wanted.value = value;
            *wanted.given = true;
        }
        if (!known) {
            std::ostringstream names;
            for (IntField const& wanted : ints) names << wanted.name << ", ";
            for (FloatField const& wanted : floats) names << wanted.name << ", ";
            std::string const list = names.str();
            fail(field.name, "one of " + list.substr(0, list.size() - 2), "an unknown field");
        }
    }
    for (IntField const& wanted : ints)
        if (!wanted.optional && !seen.count(wanted.name))
            fail(wanted.name, std::to_string(wanted.low) + " to " + std::to_string(wanted.high),
                 "no value");
}

void FieldList::addInt(char const* name, int32_t const* value) {
    fields_.emplace_back(name, value, PluginFieldType::kINT32, 1);
}

void FieldList::addFloat(char const* name, float const* value) {
    fields_.emplace_back(name, value, PluginFieldType::kFLOAT32, 1);
}

nvinfer1::PluginFieldCollection const* FieldList::collection() {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
}

}  // namespace granikv
