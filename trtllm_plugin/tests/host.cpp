// Drives the plugin library through its life as TensorRT does, without TensorRT.
//
//   host LIBRARY creators                       creators and their fields
//   host LIBRARY create PLUGIN name=i32:5 ...   create, clone, serialise, create again
//   host LIBRARY run FOLDER ...                 a whole life with one step each; see run_step.h
//   host LIBRARY life FOLDER ...                one life with all the steps, and a clone's
//   host LIBRARY formats                        types and formats that both plugins take
//   host LIBRARY reduce TYPE RANKS GIVEN ROWS   AllReduce of [ROWS, 32] built for RANKS ranks
//                                               with a communicator of GIVEN ranks (0: none)
//   host LIBRARY reduce_alone TYPE ROWS FOLDER  AllReduce with one rank's; see all_reduce.h
//
// Prints "key value" lines; exit status 1 with the reason on stderr.

#include <iostream>

#include "all_reduce.h"
#include "plugin_life.h"
#include "run_step.h"

namespace {

using namespace host;

std::string errorsOf(Library& library) {
    std::string text;
    for (auto const& line : library.logger.errors) text += (text.empty() ? "" : " | ") + line;
    return text;
}

void printCreators(Library& library) {
    for (auto* creator : library.creators) {
        std::cout << "creator " << creator->getPluginNamespace() << "::" << creator->getPluginName()
                  << " version " << creator->getPluginVersion() << " fields";
        auto const* fields = creator->getFieldNames();
        for (int32_t i = 0; i < fields->nbFields; ++i)
            std::cout << ' ' << fields->fields[i].name << ':'
                      << static_cast<int32_t>(fields->fields[i].type);
        std::cout << '\n';
    }
}

void printFields(char const* key, nvinfer1::IPluginV3& plugin) {
    auto const* fields = Library::runtime(plugin).getFieldsToSerialize();
    std::cout << key;
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        auto const& field = fields->fields[i];
        std::cout << ' ' << field.name << '=';
        if (field.type == nvinfer1::PluginFieldType::kINT32)
            std::cout << *static_cast<int32_t const*>(field.data);
        else
            std::cout << *static_cast<float const*>(field.data);
    }
    std::cout << '\n';
}

void createOnly(Library& library, std::string const& name, int count, char** arguments) {
    Fields fields;
    for (int i = 0; i < count; ++i) {
        std::string const text = arguments[i];
        size_t const equals = text.find('=');
        fields.parse(text.substr(0, equals), text.substr(equals + 1));
    }
    Plugin const made = library.create(name, fields, nvinfer1::TensorRTPhase::kBUILD);
    if (!made) throw std::runtime_error(errorsOf(library));
    Plugin const copy(made->clone());
    printFields("fields", *copy);
    Plugin const loaded = library.reload(*copy, name);
    if (!loaded) throw std::runtime_error(errorsOf(library));
    printFields("reloaded", *loaded);
    auto& core = *static_cast<nvinfer1::IPluginV3OneCore*>(
        loaded->getCapabilityInterface(nvinfer1::PluginCapabilityType::kCORE));
    std::cout << "core " << core.getPluginNamespace() << "::" << core.getPluginName() << " version "
              << core.getPluginVersion() << '\n';
}

// "accepts PLUGIN FIRST_TYPE POSITION TYPE FORMAT" for everything that is taken; all numbers are
// TensorRT's. FIRST_TYPE: of the tensor at position 0.
void printFormats(Library& library, std::string const& name, Fields& fields, int32_t num_inputs) {
    constexpr int32_t kTypes = 12, kFormats = 13;  // of DataType and TensorFormat in 10.14
    Plugin const plugin = library.create(name, fields, nvinfer1::TensorRTPhase::kBUILD);
    if (!plugin) throw std::runtime_error(errorsOf(library));
    auto& build = Library::build(*plugin);
    std::vector<nvinfer1::DynamicPluginTensorDesc> tensors(num_inputs + 1);
    for (int32_t first = 0; first < kTypes; ++first)
        for (int32_t position = 0; position <= num_inputs; ++position)
            for (int32_t type = 0; type < kTypes; ++type)
                for (int32_t format = 0; format < kFormats; ++format) {
                    tensors[0].desc.type = nvinfer1::DataType(first);
                    tensors[0].desc.format = nvinfer1::TensorFormat::kLINEAR;
                    auto& desc = tensors[position].desc;
                    desc.type = nvinfer1::DataType(type);
                    desc.format = nvinfer1::TensorFormat(format);
                    if ((position || type == first) &&
                        build.supportsFormatCombination(position, tensors.data(), num_inputs, 1))
                        std::cout << "accepts " << name << ' ' << first << ' ' << position << ' '
                                  << type << ' ' << format << '\n';
                }
    tensors.resize(num_inputs + 2);
    tensors[0].desc = {{}, nvinfer1::DataType::kBF16, nvinfer1::TensorFormat::kLINEAR, 1.0f};
    for (auto const& [inputs, outputs] :
         {std::pair(num_inputs - 1, 1), std::pair(num_inputs + 1, 1), std::pair(num_inputs, 0),
          std::pair(num_inputs, 2)})
        if (build.supportsFormatCombination(0, tensors.data(), inputs, outputs))
            std::cout << "accepts " << name << " with " << inputs << " inputs and " << outputs
                      << " outputs\n";
}

void reduce(Library& library, nvinfer1::DataType type, std::string const& ranks, int given,
            int64_t rows) {
    Fields fields;
    fields.parse("communicator", "i32:3");
    fields.parse("tp_size", "i32:" + ranks);
    fields.parse("tp_rank", "i32:1");
    nvinfer1::DynamicPluginTensorDesc tensors[2]{};
    for (auto& tensor : tensors)
        tensor.desc = {{2, {rows, 32}}, type, nvinfer1::TensorFormat::kLINEAR, 1.0f};
    Plugin const built = library.create("AllReduce", fields, nvinfer1::TensorRTPhase::kBUILD);
    if (!built || !Library::build(*built).supportsFormatCombination(0, tensors, 1, 1) ||
        !Library::build(*built).supportsFormatCombination(1, tensors, 1, 1))
        throw std::runtime_error(errorsOf(library));
    Plugin const loaded = library.reload(*built, "AllReduce");
    using Set = int32_t (*)(int32_t, void*, int32_t, int32_t);
    auto const set = library.function<Set>("granikvSetCommunicator");
    if (given && set(3, reinterpret_cast<void*>(4096), given, 1))
        throw std::runtime_error(errorsOf(library));
    void const* inputs[] = {reinterpret_cast<void*>(256)};
    void* outputs[] = {reinterpret_cast<void*>(512)};
    auto const enqueue = [&](nvinfer1::IPluginV3& plugin) {
        return Library::runtime(plugin).enqueue(&tensors[0].desc, &tensors[1].desc, inputs, outputs,
                                                nullptr, reinterpret_cast<cudaStream_t>(8));
    };
    ResourceContext context;
    Plugin const attached(Library::runtime(*loaded).attachToContext(&context));
    if (enqueue(*built) || enqueue(*attached)) throw std::runtime_error(errorsOf(library));
}

// Adds what the library logged to an error of body.
template <typename Body>
void explained(Library& library, std::string const& folder, Body&& body) {
    try {
        body();
    } catch (std::exception const& error) {
        throw std::runtime_error(folder + ": " + error.what() + ": " + errorsOf(library));
    }
}

nvinfer1::DataType typeNamed(std::string const& name) {
    if (name == "bf16") return nvinfer1::DataType::kBF16;
    return name == "fp16" ? nvinfer1::DataType::kHALF : nvinfer1::DataType::kFLOAT;
}

}  // namespace

int main(int count, char** arguments) {
    try {
        if (count < 3) throw std::runtime_error("usage: host LIBRARY creators | create | run ...");
        Library library(arguments[1]);
        std::string const what = arguments[2];
        if (what == "creators") {
            printCreators(library);
        } else if (what == "create" && count >= 4) {
            createOnly(library, arguments[3], count - 4, arguments + 4);
        } else if (what == "run" && count >= 4) {
            for (int i = 3; i < count; ++i) {
                Step step(library, arguments[i]);
                explained(library, arguments[i], [&] { step.run(); });
            }
        } else if (what == "life" && count >= 4) {
            std::deque<Step> steps;
            for (int i = 3; i < count; ++i) steps.emplace_back(library, arguments[i]);
            explained(library, arguments[3], [&] { Step::runAll(steps); });
        } else if (what == "formats") {
            Fields attention, all_reduce;
            for (char const* name : {"layer", "num_qo_heads", "num_kv_heads", "max_partials"})
                attention.parse(name, "i32:1");
            attention.parse("head_dim", "i32:64");
            for (char const* name : {"tp_size", "tp_rank"})
                all_reduce.parse(name, name[3] == 's' ? "i32:2" : "i32:1");
            printFormats(library, "HotColdAttention", attention, granikv::kNumInputs);
            printFormats(library, "AllReduce", all_reduce, 1);
        } else if (what == "reduce" && count == 7) {
            reduce(library, typeNamed(arguments[3]), arguments[4], std::stoi(arguments[5]),
                   std::stoll(arguments[6]));
        } else if (what == "reduce_alone" && count == 6) {
            explained(library, arguments[5], [&] {
                reduceAlone(library, typeNamed(arguments[3]), std::stoll(arguments[4]),
                            arguments[5]);
            });
        } else {
            throw std::runtime_error("unknown command " + what);
        }
        return 0;
    } catch (std::exception const& error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
