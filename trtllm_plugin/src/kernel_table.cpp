#include "kernel_table.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>

#include "granikv_cubins.h"

// The blob is assembled in, not compiled: megabytes of initialisers would take minutes.
asm(".section .rodata\n"
    ".balign 64\n"
    "granikv_blob:\n"
    ".incbin \"" GRANIKV_CUBIN_FILE
    "\"\n"
    "granikv_blob_end:\n"
    ".byte 0\n"
    ".previous\n");
extern "C" {
__attribute__((visibility("hidden"))) extern unsigned char const granikv_blob[];
__attribute__((visibility("hidden"))) extern unsigned char const granikv_blob_end[];
}

namespace granikv {
namespace {

struct Known {
    char const* name;
    char const* kinds;
};

#define GRANIKV_ROW(name, kinds) {#name, kinds},
constexpr Known kParameters[] = {GRANIKV_PARAMETERS(GRANIKV_ROW)};
#undef GRANIKV_ROW

std::string capabilityName(int32_t capability) {
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

std::string rebuildHint(std::string const& arch) {
    return "rebuild with: python build_scripts/build_plugin.py --arch " + arch + " --models all";
}

bool sameHeads(Program const& p, Heads const& heads) {
    return Heads{p.num_qo_heads, p.num_kv_heads, p.head_dim, p.element} == heads;
}

std::set<int32_t> builtArchitectures() {
    std::set<int32_t> found;
    for (auto const& program : generated::kPrograms) found.insert(program.capability);
    return found;
}

std::string builtCapabilities() {
    std::string text;
    for (int32_t arch : builtArchitectures())
        text += (text.empty() ? "" : ", ") + capabilityName(arch);
    return text;
}

std::string archOption() {  // those built, as --arch takes them
    std::string text;
    for (int32_t arch : builtArchitectures())
        text += (text.empty() ? "" : ",") + std::to_string(arch);
    return text;
}

std::string builtHeads() {
    std::set<std::string> found;
    for (auto const& p : generated::kPrograms)
        found.insert(describe({p.num_qo_heads, p.num_kv_heads, p.head_dim, p.element}));
    std::string text;
    for (auto const& heads : found) text += (text.empty() ? "" : "; ") + heads;
    return text;
}

// 8.x runs what was built for a lower 8.x; later cubins serve their own capability only.
bool serves(int32_t built, int32_t device) {
    return built == device || (built / 10 == 8 && device / 10 == 8 && built < device);
}

}  // namespace

char const* elementName(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kBF16: return "bf16";
        case nvinfer1::DataType::kHALF: return "fp16";
        case nvinfer1::DataType::kFLOAT: return "fp32";
        default: return "?";
    }
}

std::string describe(Heads const& heads) {
    std::ostringstream text;
    text << heads.num_qo_heads << " query and " << heads.num_kv_heads << " KV heads of "
         << heads.head_dim << " " << elementName(heads.element);
    return text.str();
}

Cubin const& cubinAt(int32_t index) { return generated::kCubins[index]; }

void const* imageOf(Cubin const& cubin) { return granikv_blob + cubin.offset; }

char const* layoutName(int32_t index) { return generated::kLayoutNames[index]; }

std::vector<Parameter> parametersOf(Cubin const& cubin) {
    std::vector<Parameter> found;
    std::istringstream words(cubin.parameters);
    for (std::string word; words >> word;) {
        size_t const colon = word.find(':');
        std::string const name = word.substr(0, colon);
        auto const* known = std::find_if(std::begin(kParameters), std::end(kParameters),
                                         [&](Known const& k) { return name == k.name; });
        char const kind = word.back();
        if (known == std::end(kParameters) || !std::strchr(known->kinds, kind))
            throw std::runtime_error(
                std::string(cubin.kernel) + ": parameter '" + word +
                "' is not one that this library fills; build library and cubins from one commit");
        found.push_back({static_cast<Param>(known - kParameters), kind});
    }
    return found;
}

std::string checkTable() {
    size_t const blob_bytes = granikv_blob_end - granikv_blob;
    if (blob_bytes != generated::kBlobBytes)
        return "cubins: expected " + std::to_string(generated::kBlobBytes) + " bytes, got " +
               std::to_string(blob_bytes);
    for (Cubin const& cubin : generated::kCubins) {
        std::string const name = std::string(cubin.kernel) + " at " + std::to_string(cubin.offset);
        if (cubin.offset + cubin.size > blob_bytes || std::memcmp(imageOf(cubin), "\177ELF", 4))
            return name + ": no cubin there";
        if (cubin.scratch_bytes)
            return name + ": needs " + std::to_string(cubin.scratch_bytes) +
                   " bytes of scratch per block, expected none";
        if (cubin.num_warps < 1 || cubin.num_warps > 32)
            return name + ": num_warps " + std::to_string(cubin.num_warps) + ", expected 1 to 32";
        try {
            bool const has_map = std::strstr(cubin.parameters, ":m") != nullptr;
            if (parametersOf(cubin).empty() || has_map != (cubin.tensor_map.element_bytes != 0))
                return name + ": no parameters, or tensor maps without their description";
        } catch (std::exception const& error) {
            return error.what();
        }
    }
    return "";
}

Program const* findProgram(Heads const& heads, int32_t major, int32_t minor, int32_t shared_limit,
                           std::string& error) {
    int32_t const device = major * 10 + minor;
    Program const* best = nullptr;
    bool capability_is_built = false;
    for (Program const& program : generated::kPrograms) {
        if (!serves(program.capability, device)) continue;
        capability_is_built = true;
        if (sameHeads(program, heads) && (!best || program.capability > best->capability))
            best = &program;
    }
    if (!capability_is_built) {
        error = "compute capability: expected one of " + builtCapabilities() + " (as built), got " +
                capabilityName(device) + "; " + rebuildHint(std::to_string(device));
        return nullptr;
    }
    if (!best) {
        error = "heads: expected one of [" + builtHeads() + "] (as built), got " + describe(heads) +
                "; add them to trtllm_plugin/table.py and " + rebuildHint(std::to_string(device));
        return nullptr;
    }
    for (int32_t index : cubinsOf(*best)) {
        Cubin const& cubin = cubinAt(index);
        if (cubin.shared_bytes > shared_limit) {
            error = std::string(cubin.kernel) + ": expected at most " +
                    std::to_string(shared_limit) +
                    " bytes of shared memory on compute capability " + capabilityName(device) +
                    ", got " + std::to_string(cubin.shared_bytes) + "; " +
                    rebuildHint(std::to_string(device));
            return nullptr;
        }
    }
    return best;
}

bool isBuilt(Heads const& heads, std::string& error) {
    for (Program const& program : generated::kPrograms)
        if (sameHeads(program, heads)) return true;
    error = "heads: expected one of [" + builtHeads() + "] (as built), got " + describe(heads) +
            "; add them to trtllm_plugin/table.py and " + rebuildHint(archOption());
    return false;
}

std::string buildSummary() {
    return std::string("sources ") + generated::kSourceHash + "\ntriton " +
           generated::kTritonVersion + "\ncapabilities " + builtCapabilities() + "\ncubins " +
           std::to_string(std::size(generated::kCubins)) + "\nheads " + builtHeads() + "\n";
}

std::vector<int32_t> cubinsOf(Program const& program) {
    std::set<int32_t> found{program.append, program.extend};
    for (LayoutProgram const& layout : program.layouts) {
        for (int i = 0; i < 2; ++i)
            found.insert({layout.small[i], layout.hot[i], layout.cold[0][i], layout.cold[1][i],
                          layout.merge[i]});
        found.insert({layout.hot_gluon, layout.cold_gluon});
    }
    found.erase(-1);
    return {found.begin(), found.end()};
}

}  // namespace granikv
