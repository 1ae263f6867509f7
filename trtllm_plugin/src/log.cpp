#include "log.h"

#include <atomic>
#include <cstdio>

namespace granikv {
namespace {

std::atomic<nvinfer1::ILogger*> given_logger{nullptr};
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};
thread_local std::string last_error;

void log(nvinfer1::ILogger::Severity severity, std::string const& text) {
    std::string const line = "GraniKV: " + text;
    nvinfer1::ILogger* logger = given_logger;
    nvinfer1::ILoggerFinder* finder = logger_finder;
    if (!logger && finder) logger = finder->findLogger();
    if (logger)
        logger->log(severity, line.c_str());
    else if (severity <= nvinfer1::ILogger::Severity::kERROR)
        std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

void setLogger(nvinfer1::ILogger* logger) { given_logger = logger; }

void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void logError(std::string const& text) {
    last_error = text;
    log(nvinfer1::ILogger::Severity::kERROR, text);
}

void logInfo(std::string const& text) { log(nvinfer1::ILogger::Severity::kINFO, text); }

char const* lastError() { return last_error.c_str(); }

}  // namespace granikv
