// Messages to TensorRT's logger, or to stderr before there is one, and the last error of a thread.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <string>

namespace granikv {

void setLogger(nvinfer1::ILogger* logger);
void setLoggerFinder(nvinfer1::ILoggerFinder* finder);
void logError(std::string const& text);
void logInfo(std::string const& text);
char const* lastError();  // of this thread; "" when none

// Runs body; an exception becomes a logged error and `failed`. Nothing is thrown to TensorRT.
template <typename Result, typename Body>
Result guarded(char const* where, Result failed, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        try {
            logError(std::string(where) + ": " + error.what());
        } catch (...) {
        }
    } catch (...) {
    }
    return failed;
}

}  // namespace granikv
