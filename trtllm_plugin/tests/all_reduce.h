// AllReduce through a plugin's whole life, with a communicator of one rank that the library makes:
// the sum over one rank is the input.
#pragma once

#include "device.h"
#include "files.h"
#include "plugin_life.h"

namespace host {

// FOLDER/in.bin holds [rows, 32] of `type`. Writes out.bin (eager) and out_graph.bin (captured and
// replayed); the output is filled with NaN before each.
inline void reduceAlone(Library& library, nvinfer1::DataType type, int64_t rows,
                        std::string const& folder) {
    constexpr char kName[] = "AllReduce";
    constexpr int32_t kNumber = 3;
    Fields fields;
    fields.parse("communicator", "i32:" + std::to_string(kNumber));
    fields.parse("tp_size", "i32:1");
    fields.parse("tp_rank", "i32:0");
    Plugin const built = library.create(kName, fields, TensorRTPhase::kBUILD);
    require(built != nullptr, "createPlugin");
    auto& build = Library::build(*built);
    nvinfer1::DynamicPluginTensorDesc tensors[2]{};
    for (auto& tensor : tensors) {
        tensor.desc = {{2, {rows, 32}}, type, nvinfer1::TensorFormat::kLINEAR, 1.0f};
        tensor.min = tensor.opt = tensor.max = tensor.desc.dims;
    }
    for (int32_t i = 0; i < 2; ++i)
        require(build.supportsFormatCombination(i, tensors, 1, 1), "supportsFormatCombination");
    Constant const dims[] = {Constant(rows), Constant(32)};
    nvinfer1::DimsExprs in{}, out{};
    in.nbDims = 2;
    for (int32_t i = 0; i < 2; ++i) in.d[i] = &dims[i];
    ExprBuilder builder;
    require(build.getOutputShapes(&in, 1, nullptr, 0, &out, 1, builder) == 0 && out.nbDims == 2 &&
                out.d[0] == in.d[0] && out.d[1] == in.d[1],
            "getOutputShapes");
    require(build.configurePlugin(&tensors[0], 1, &tensors[1], 1) == 0, "configurePlugin");
    require(build.getWorkspaceSize(&tensors[0], 1, &tensors[1], 1) == 0, "getWorkspaceSize");

    Plugin const loaded = library.reload(*built, kName);
    require(loaded != nullptr, "createPlugin from serialised fields");
    Device device;
    char unique_id[128];
    using Id = int32_t (*)(void*, int32_t);
    using Init = int32_t (*)(int32_t, void const*, int32_t, int32_t);
    require(library.function<Id>("granikvNcclUniqueId")(unique_id, sizeof(unique_id)) == 0,
            "granikvNcclUniqueId");
    require(library.function<Init>("granikvInitCommunicator")(kNumber, unique_id, 1, 0) == 0,
            "granikvInitCommunicator");
    ResourceContext context;
    Plugin const attached(Library::runtime(*loaded).attachToContext(&context));
    require(attached != nullptr, "attachToContext");
    auto& runtime = Library::runtime(*attached);
    require(runtime.onShapeChange(&tensors[0].desc, 1, &tensors[1].desc, 1) == 0, "onShapeChange");

    std::string const given = readFile(folder + "/in.bin");
    require(given.size() == size_t(rows) * 32 * (type == nvinfer1::DataType::kFLOAT ? 4 : 2),
            "in.bin has another size");
    CUdeviceptr const from = device.upload(given), to = device.allocate(given.size());
    auto const enqueue = [&] {
        void const* inputs[] = {reinterpret_cast<void const*>(from)};
        void* outputs[] = {reinterpret_cast<void*>(to)};
        require(runtime.enqueue(&tensors[0].desc, &tensors[1].desc, inputs, outputs, nullptr,
                                device.stream) == 0,
                "enqueue");
    };
    device.fill(to, 0xff, given.size());
    enqueue();
    device.synchronize();
    writeFile(folder + "/out.bin", device.download(to, given.size()));
    device.fill(to, 0xff, given.size());
    device.throughGraph(enqueue);
    writeFile(folder + "/out_graph.bin", device.download(to, given.size()));
}

}  // namespace host
