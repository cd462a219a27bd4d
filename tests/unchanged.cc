#include "tests/unchanged.h"

#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "xxhash.h"

namespace lossd::test_program {
namespace {

constexpr std::string_view kXml = "xml:";
constexpr char kKeySuffix[] = ".key";

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

// That this process may use, by which work is divided.
int Processors() {
  cpu_set_t processors;
  return sched_getaffinity(0, sizeof(processors), &processors) == 0 ? CPU_COUNT(&processors) : 0;
}

bool ChangesResult(std::string_view variable) {
  return variable.starts_with("OMP_") || variable.starts_with("ONEDNN_") || variable.starts_with("DNNL_") ||
         (variable.starts_with("LOSSD_") && !variable.starts_with("LOSSD_UNCHANGED=") &&
          !variable.starts_with("LOSSD_HERMETIC=")) ||
         (variable.starts_with("GTEST_") && !variable.starts_with("GTEST_OUTPUT="));
}

std::string KeyOf(const std::vector<std::string>& arguments) {
  std::string all = ProcessorFlags() + '\n' + std::to_string(Processors());
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (ChangesResult(*entry)) all += std::string("\n") + *entry;
  }
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
  for (const std::string& file : {note_, report_ + kKeySuffix, report_}) std::filesystem::remove(file);
}

void Unchanged::OfferNote() const {
  if (!key_.empty()) std::ofstream(report_ + kKeySuffix) << key_;
}

}  // namespace lossd::test_program
