// The interfaces that TensorRT gives to a plugin, as the test host implements them.
#pragma once

#include <NvInferImpl.h>
#include <NvInferRuntime.h>

#include <cstdio>
#include <deque>
#include <stdexcept>
#include <string>

namespace host {

class Logger final : public nvinfer1::ILogger {
public:
    void log(Severity severity, char const* text) noexcept override {
        if (severity <= Severity::kERROR) errors.emplace_back(text);
    }
    std::deque<std::string> errors;
};

class LoggerFinder final : public nvinfer1::ILoggerFinder {
public:
    explicit LoggerFinder(Logger& logger) : logger_(logger) {}
    nvinfer1::ILogger* findLogger() override { return &logger_; }

private:
    Logger& logger_;
};

// A dimension that is a number.
class Constant final : public nvinfer1::IDimensionExpr {
public:
    explicit Constant(int64_t value) : value_(value) { mImpl = &value_; }

private:
    struct Value final : nvinfer1::apiv::VDimensionExpr {
        explicit Value(int64_t v) : value(v) {}
        bool isConstant() const override { return true; }
        int64_t getConstantValue() const override { return value; }
        bool isSizeTensor() const override { return false; }
        int64_t value;
    };
    Value value_;
};

class ExprBuilder final : public nvinfer1::IExprBuilder {
public:
    ExprBuilder() { mImpl = &made_; }

private:
    struct Made final : nvinfer1::apiv::VExprBuilder {
        nvinfer1::IDimensionExpr const* constant(int64_t value) override {
            return &values.emplace_back(value);
        }
        nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation,
                                                  nvinfer1::IDimensionExpr const&,
                                                  nvinfer1::IDimensionExpr const&) override {
            throw std::logic_error("the plugin's output shape needs no operation");
        }
        nvinfer1::IDimensionExpr const* declareSizeTensor(
            int32_t, nvinfer1::IDimensionExpr const&, nvinfer1::IDimensionExpr const&) override {
            throw std::logic_error("the plugin has no size tensor");
        }
        std::deque<Constant> values;
    };
    Made made_;
};

class ResourceContext final : public nvinfer1::IPluginResourceContext {
public:
    nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
    nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

}  // namespace host
