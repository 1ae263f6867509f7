// A plugin library as TensorRT uses it: load, create, serialise, create again.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake_tensorrt.h"

namespace host {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

// Fields with storage of their own.
class Fields {
public:
    void add(std::string const& name, PluginFieldType type, void const* bytes, size_t size) {
        names_.push_back(std::make_unique<std::string>(name));
        bytes_.push_back(std::make_unique<std::string>(static_cast<char const*>(bytes), size));
        list_.emplace_back(names_.back()->c_str(), bytes_.back()->data(), type, 1);
    }
    // "i32:5", "i64:5" or "f32:0.5"
    void parse(std::string const& name, std::string const& text) {
        std::string const value = text.substr(4);
        if (text.rfind("i32:", 0) == 0) {
            int32_t const number = std::stoi(value);
            add(name, PluginFieldType::kINT32, &number, sizeof(number));
        } else if (text.rfind("i64:", 0) == 0) {
            int64_t const number = std::stoll(value);
            add(name, PluginFieldType::kINT64, &number, sizeof(number));
        } else {
            float const number = std::stof(value);
            add(name, PluginFieldType::kFLOAT32, &number, sizeof(number));
        }
    }
    nvinfer1::PluginFieldCollection const* collection() {
        collection_ = {static_cast<int32_t>(list_.size()), list_.data()};
        return &collection_;
    }

private:
    std::vector<std::unique_ptr<std::string>> names_, bytes_;
    std::vector<PluginField> list_;
    nvinfer1::PluginFieldCollection collection_{};
};

using Plugin = std::unique_ptr<nvinfer1::IPluginV3>;

class Library {
public:
    explicit Library(char const* path) : finder_(logger), handle_(dlopen(path, RTLD_NOW)) {
        if (!handle_) throw std::runtime_error(dlerror());
        function<void (*)(nvinfer1::ILoggerFinder*)>("setLoggerFinder")(&finder_);
        using Get = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
        int32_t count = 0;
        auto const* list = function<Get>("getCreators")(count);
        for (int32_t i = 0; i < count; ++i) {
            if (std::strcmp(list[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE"))
                throw std::runtime_error("a creator is no IPluginCreatorV3One");
            creators.push_back(static_cast<nvinfer1::IPluginCreatorV3One*>(list[i]));
        }
    }
    template <typename Function>
    Function function(char const* name) {
        void* found = dlsym(handle_, name);
        if (!found) throw std::runtime_error(std::string("not exported: ") + name);
        return reinterpret_cast<Function>(found);
    }
    nvinfer1::IPluginCreatorV3One& creator(std::string const& name) {
        for (auto* each : creators)
            if (name == each->getPluginName()) return *each;
        throw std::runtime_error("no creator " + name);
    }
    Plugin create(std::string const& name, Fields& fields, TensorRTPhase phase) {
        return Plugin(creator(name).createPlugin("node", fields.collection(), phase));
    }
    // As an engine keeps it: the fields' bytes, and a plugin made from them.
    Plugin reload(nvinfer1::IPluginV3& plugin, std::string const& name) {
        Fields kept;
        auto const* written = runtime(plugin).getFieldsToSerialize();
        for (int32_t i = 0; i < written->nbFields; ++i) {
            PluginField const& field = written->fields[i];
            kept.add(field.name, field.type, field.data, 4 * size_t(field.length));
        }
        return create(name, kept, TensorRTPhase::kRUNTIME);
    }

    static nvinfer1::IPluginV3OneBuild& build(nvinfer1::IPluginV3& plugin) {
        return *static_cast<nvinfer1::IPluginV3OneBuild*>(
            plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kBUILD));
    }
    static nvinfer1::IPluginV3OneRuntime& runtime(nvinfer1::IPluginV3& plugin) {
        return *static_cast<nvinfer1::IPluginV3OneRuntime*>(
            plugin.getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
    }

    Logger logger;
    std::vector<nvinfer1::IPluginCreatorV3One*> creators;

private:
    LoggerFinder finder_;
    void* handle_;
};

}  // namespace host
