// One step of one layer through the plugin's whole life, from files to files.
//
// FOLDER/manifest.txt has lines of "key value ...":
//     field NAME VALUE                 plugin fields, as `host create` takes them
//     element bf16|fp16|fp32   layer N   num_layers N   capacity N   binding N   max_rows N
//     num_qo_heads N   num_kv_heads N   head_dim N
//     workspace_offset N               bytes by which the workspace is out of alignment;
//     qkv_offset N   out_offset N      likewise an input and the output
//     bind 0|1                         0: the arenas are not bound before the step
//     bound_num_qo_heads N   bound_num_kv_heads N   bound_head_dim N
//                                      heads of the arenas, if they are not the step's
//     time N                           measure N enqueues afterwards (output: enqueue_us, median
//                                      and 90th percentile)
//     tensor INDEX RANK D0 D1 ... FILE|-
// k.bin and v.bin hold the arenas [num_layers, capacity, Hkv, D]. Written: out.bin (eager),
// out_graph.bin (captured and replayed), k_out.bin and v_out.bin (all layers, after both); of
// several steps in one plugin's life out_clone.bin, by a context of a clone, instead of
// out_graph.bin.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <iostream>
#include <sstream>

#include "device.h"
#include "files.h"
#include "plugin_io.h"
#include "plugin_life.h"

namespace host {

class Step {
public:
    Step(Library& library, std::string folder) : library_(library), folder_(std::move(folder)) {
        std::ifstream lines(folder_ + "/manifest.txt");
        for (std::string line; std::getline(lines, line);) read(line);
        if (inputs_.size() != granikv::kNumInputs) throw std::runtime_error("tensors are missing");
    }

    // The whole life, for this step alone.
    void run() {
        Plugin const built = create();
        size_t const workspace_bytes = configure(*built);
        Plugin const loaded = reload(*built);
        Device device;  // makes its context current, as TensorRT has it when it attaches
        Plugin const attached = attach(*loaded);
        begin(device, workspace_bytes);
        runFresh(device, *attached, "out.bin");
        poison(device);
        device.throughGraph([&] { enqueue(device, *attached); });
        write("out_graph.bin", device.download(out_, out_bytes_));
        finish(device);
        if (numbers_["time"]) time(device, [&] { enqueue(device, *attached); });
        unbind();
        std::cout << "workspace " << workspace_bytes << '\n';
    }

    // One plugin, with the first step's fields, for all: in a context, and in one of a clone.
    static void runAll(std::deque<Step>& steps) {
        Step& first = steps.front();
        Plugin const built = first.create();
        size_t workspace_bytes = 0;
        for (Step& step : steps) {
            size_t const bytes = step.configure(*built);
            workspace_bytes = std::max(workspace_bytes, bytes);
        }
        Plugin const loaded = first.reload(*built);
        Device device;
        Plugin const copy(loaded->clone());
        Plugin const attached = first.attach(*loaded), other = first.attach(*copy);
        for (Step& step : steps) {
            step.begin(device, workspace_bytes);
            step.runFresh(device, *attached, "out.bin");
            step.runFresh(device, *other, "out_clone.bin");
            step.finish(device);
            step.unbind();
        }
    }

private:
    static constexpr char kName[] = "HotColdAttention";

    Plugin create() {
        Plugin made = library_.create(kName, fields_, nvinfer1::TensorRTPhase::kBUILD);
        if (!made) throw std::runtime_error("createPlugin");
        return made;
    }
    Plugin reload(nvinfer1::IPluginV3& built) {
        Plugin made = library_.reload(built, kName);
        if (!made) throw std::runtime_error("createPlugin from serialised fields");
        return made;
    }
    Plugin attach(nvinfer1::IPluginV3& loaded) {
        Plugin made(Library::runtime(loaded).attachToContext(&context_));
        if (!made) throw std::runtime_error("attachToContext");
        require(Library::runtime(*made).setTactic(0) == 0, "setTactic");
        return made;
    }

    // Inputs and arenas to the device, the binding, the workspace.
    void begin(Device& device, size_t workspace_bytes) {
        upload(device);
        if (numbers_["bind"]) bind();
        CUdeviceptr const workspace = device.allocate(workspace_bytes);
        workspace_ = reinterpret_cast<void*>(workspace + numbers_["workspace_offset"]);
    }

    void enqueue(Device& device, nvinfer1::IPluginV3& plugin) {
        void* outputs[] = {reinterpret_cast<void*>(out_ + numbers_["out_offset"])};
        require(Library::runtime(plugin).enqueue(descs_.data(), &out_desc_, pointers_.data(),
                                                 outputs, workspace_, device.stream) == 0,
                "enqueue");
    }

    // The shapes, then the step into a poisoned output, which goes to a file.
    void runFresh(Device& device, nvinfer1::IPluginV3& plugin, char const* name) {
        require(Library::runtime(plugin).onShapeChange(descs_.data(), granikv::kNumInputs,
                                                       &out_desc_, 1) == 0,
                "onShapeChange");
        poison(device);
        enqueue(device, plugin);
        device.synchronize();
        write(name, device.download(out_, out_bytes_));
    }

    void finish(Device& device) {
        write("k_out.bin", device.download(k_, arena_bytes_));
        write("v_out.bin", device.download(v_, arena_bytes_));
    }

    void unbind() {
        if (numbers_["bind"])
            require(library_.function<int32_t (*)(int32_t)>("granikvUnbindArenas")(
                        int32_t(numbers_["binding"])) == 0,
                    "granikvUnbindArenas");
    }

    // Host time of one enqueue; the device is waited for between calls, outside the time.
    template <typename Body>
    void time(Device& device, Body&& enqueue) {
        std::vector<double> microseconds;
        for (int64_t i = 0; i < numbers_["time"]; ++i) {
            auto const begin = std::chrono::steady_clock::now();
            enqueue();
            auto const end = std::chrono::steady_clock::now();
            microseconds.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
            device.synchronize();
        }
        std::sort(microseconds.begin(), microseconds.end());
        std::cout << "enqueue_us " << microseconds[microseconds.size() / 2] << ' '
                  << microseconds[microseconds.size() * 9 / 10] << '\n';
    }

    void write(char const* name, std::string const& bytes) {
        writeFile(folder_ + "/" + name, bytes);
    }
    nvinfer1::DataType typeOf(granikv::Type type) const {
        if (type == granikv::Type::kFloat) return nvinfer1::DataType::kFLOAT;
        if (type == granikv::Type::kInt32) return nvinfer1::DataType::kINT32;
        if (element_ == "bf16") return nvinfer1::DataType::kBF16;
        return element_ == "fp16" ? nvinfer1::DataType::kHALF : nvinfer1::DataType::kFLOAT;
    }
    size_t elementBytes() const { return element_ == "fp32" ? 4 : 2; }

    void read(std::string const& line) {
        std::istringstream words(line);
        std::string key, name, value;
        words >> key;
        if (key == "field") {
            words >> name >> value;
            fields_.parse(name, value);
        } else if (key == "element") {
            words >> element_;
        } else if (key == "tensor") {
            int32_t index = 0;
            nvinfer1::PluginTensorDesc desc{};
            words >> index >> desc.dims.nbDims;
            for (int32_t i = 0; i < desc.dims.nbDims; ++i) words >> desc.dims.d[i];
            words >> value;
            require(index == int32_t(inputs_.size()), "tensors are out of order");
            desc.type = typeOf(granikv::kInputs[index].type);
            desc.format = nvinfer1::TensorFormat::kLINEAR;
            desc.scale = 1.0f;
            descs_.push_back(desc);
            inputs_.push_back(value == "-" ? "" : readFile(folder_ + "/" + value));
        } else if (!key.empty()) {
            words >> numbers_[key];
        }
    }

    // The build phase; returns the workspace's bytes.
    size_t configure(nvinfer1::IPluginV3& plugin) {
        auto& build = Library::build(plugin);
        std::vector<nvinfer1::DynamicPluginTensorDesc> tensors;
        for (auto const& desc : descs_) tensors.push_back({desc, desc.dims, desc.dims, desc.dims});
        tensors[granikv::kQkv].max.d[0] = numbers_["max_rows"];
        out_desc_ = descs_[granikv::kQkv];
        out_desc_.dims.d[1] = numbers_["num_qo_heads"] * numbers_["head_dim"];
        tensors.push_back({out_desc_, out_desc_.dims, out_desc_.dims, out_desc_.dims});
        for (int32_t i = 0; i < int32_t(tensors.size()); ++i)
            require(build.supportsFormatCombination(i, tensors.data(), granikv::kNumInputs, 1),
                    "supportsFormatCombination");
        nvinfer1::DataType types[granikv::kNumInputs], out_type{};
        for (int32_t i = 0; i < granikv::kNumInputs; ++i) types[i] = descs_[i].type;
        require(build.getNbOutputs() == 1 &&
                    build.getOutputDataTypes(&out_type, 1, types, granikv::kNumInputs) == 0 &&
                    out_type == out_desc_.type,
                "getOutputDataTypes");
        checkOutputShape(build);
        require(build.configurePlugin(tensors.data(), granikv::kNumInputs,
                                      &tensors[granikv::kNumInputs], 1) == 0,
                "configurePlugin");
        // a timing run: nothing is bound, nothing is allocated
        std::vector<void const*> nothing(granikv::kNumInputs, nullptr);
        void* no_output[] = {nullptr};
        require(Library::runtime(plugin).enqueue(descs_.data(), &out_desc_, nothing.data(),
                                                 no_output, nullptr, nullptr) == 0,
                "enqueue in the build phase");
        return build.getWorkspaceSize(tensors.data(), granikv::kNumInputs,
                                      &tensors[granikv::kNumInputs], 1);
    }

    void checkOutputShape(nvinfer1::IPluginV3OneBuild& build) {
        ExprBuilder builder;
        std::deque<Constant> numbers;
        std::vector<nvinfer1::DimsExprs> dims(granikv::kNumInputs);
        for (int32_t i = 0; i < granikv::kNumInputs; ++i) {
            dims[i].nbDims = descs_[i].dims.nbDims;
            for (int32_t d = 0; d < dims[i].nbDims; ++d)
                dims[i].d[d] = &numbers.emplace_back(descs_[i].dims.d[d]);
        }
        nvinfer1::DimsExprs out{};
        require(build.getOutputShapes(dims.data(), granikv::kNumInputs, nullptr, 0, &out, 1,
                                      builder) == 0 &&
                    out.nbDims == 2 && out.d[0] == dims[granikv::kQkv].d[0] &&
                    out.d[1]->getConstantValue() == out_desc_.dims.d[1],
                "getOutputShapes");
    }

    void upload(Device& device) {
        for (auto const& bytes : inputs_)
            pointers_.push_back(reinterpret_cast<void const*>(device.upload(bytes)));
        auto const* qkv = static_cast<char const*>(pointers_[granikv::kQkv]);
        pointers_[granikv::kQkv] = qkv + numbers_["qkv_offset"];
        out_bytes_ = size_t(out_desc_.dims.d[0]) * out_desc_.dims.d[1] * elementBytes();
        out_ = device.allocate(out_bytes_);
        std::string const k = readFile(folder_ + "/k.bin"), v = readFile(folder_ + "/v.bin");
        arena_bytes_ = k.size();
        k_ = device.upload(k);
        v_ = device.upload(v);
    }

    void poison(Device& device) { device.fill(out_, 0xff, out_bytes_); }  // NaN in every type

    void bind() {
        using Bind = int32_t (*)(int32_t, int32_t, int32_t, int64_t const*, int64_t, int32_t,
                                 int32_t, int32_t, char const*);
        auto const bound = [&](std::string const& name) {
            auto const found = numbers_.find("bound_" + name);
            return int32_t(found == numbers_.end() ? numbers_[name] : found->second);
        };
        int64_t const layers = numbers_["num_layers"];
        int64_t const layer_bytes = int64_t(arena_bytes_) / layers;
        std::vector<int64_t> addresses;
        for (int64_t layer = 0; layer < layers; ++layer) {
            addresses.push_back(int64_t(k_) + layer * layer_bytes);
            addresses.push_back(int64_t(v_) + layer * layer_bytes);
        }
        require(library_.function<Bind>("granikvBindArenas")(
                    int32_t(numbers_["binding"]), 0, int32_t(layers), addresses.data(),
                    numbers_["capacity"], bound("num_qo_heads"), bound("num_kv_heads"),
                    bound("head_dim"), element_.c_str()) == 0,
                "granikvBindArenas");
    }

    Library& library_;
    std::string folder_, element_;
    Fields fields_;
    std::map<std::string, int64_t> numbers_;
    std::vector<std::string> inputs_;  // bytes
    std::vector<nvinfer1::PluginTensorDesc> descs_;
    nvinfer1::PluginTensorDesc out_desc_{};
    ResourceContext context_;
    std::vector<void const*> pointers_;
    void* workspace_{};
    CUdeviceptr out_{}, k_{}, v_{};
    size_t out_bytes_{}, arena_bytes_{};
};

}  // namespace host
