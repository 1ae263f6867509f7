// KV arenas: their addresses under a number, with the loaded kernels and the encoded tensor maps.
//
// Everything that may allocate, load or synchronise happens in bindArenas; a step only looks up.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "driver.h"
#include "kernel_table.h"

namespace granikv {

constexpr int32_t kMaxLayers = 4096;

struct Kernel {
    CUfunction function{};
    Cubin const* cubin{};
    std::vector<Parameter> parameters;
    int32_t map_kind{-1};  // index into Arenas::maps; -1: takes none
};

// The kernels of one program, loaded in a device's primary context. Kept for the process: a
// captured graph may hold their functions.
struct DeviceKernels {
    Driver const* driver{};
    Program const* program{};
    int32_t device{};
    int32_t num_sms{};
    CUcontext context{};
    std::map<int32_t, Kernel> kernels;  // by index of the cubin
    std::vector<TensorMapSpec> map_kinds;
};

struct LayerArenas {
    void* k{};  // [capacity, Hkv, D]
    void* v{};
};

struct Arenas {
    std::shared_ptr<DeviceKernels const> kernels;
    int64_t capacity{};  // tokens
    std::vector<LayerArenas> layers;
    std::vector<std::vector<std::array<CUtensorMap, 2>>> maps;  // [map kind][layer]: K, V
};

// addresses: [num_layers, 2], K and V of each layer. Throws std::invalid_argument (also for a
// number that is bound) or std::runtime_error.
void bindArenas(int32_t binding, int32_t device, int32_t num_layers, int64_t const* addresses,
                int64_t capacity, Heads const& heads);
bool unbindArenas(int32_t binding);                         // false when nothing was bound
std::shared_ptr<Arenas const> findArenas(int32_t binding);  // nullptr when nothing is bound

}  // namespace granikv
