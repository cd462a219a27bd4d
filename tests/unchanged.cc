#include "tests/unchanged.h"

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "xxhash.h"

namespace lossd::test_program {
namespace {

constexpr std::string_view kXml = "xml:";

std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

// The program, and every library that it has loaded.
std::set<std::string> MappedFiles() {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path != std::string::npos) files.insert(line.substr(path));
  }
  return files;
}

// What the processor can do, which kernels are chosen by.
std::string ProcessorFlags() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.starts_with("flags")) return line;
  }
  return {};
}

std::string KeyOf(const std::vector<std::string>& arguments) {
  std::string all = ProcessorFlags();
  for (const std::string& argument : arguments) all += '\n' + argument;
  for (const std::string& file : MappedFiles()) {
    const std::string content = ContentOf(file);
    all += '\n' + file + ' ' + std::to_string(XXH3_64bits(content.data(), content.size()));
  }
  return std::to_string(XXH3_64bits(all.data(), all.size()));
}

}  // namespace

Unchanged::Unchanged(const std::string& output, const std::vector<std::string>& arguments,
                     Hermetic hermetic) {
  if (!output.starts_with(kXml)) return;
  report_ = output.substr(kXml.size());
  note_ = report_ + ".passed";
  if (hermetic == Hermetic::kYes) key_ = KeyOf(arguments);
}

bool Unchanged::PassedBefore() const {
  return !key_.empty() && std::filesystem::exists(report_) && ContentOf(note_) == key_;
}

void Unchanged::Forget() const {
  if (report_.empty()) return;
  std::filesystem::remove(note_);
  std::filesystem::remove(report_);
}

void Unchanged::NotePassed() const {
  if (!key_.empty()) std::ofstream(note_) << key_;
}

}  // namespace lossd::test_program
