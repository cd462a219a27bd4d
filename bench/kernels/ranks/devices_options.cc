#include "bench/kernels/ranks/devices_options.h"

#include <set>

#include "bench/kernels/command_line.h"
#include "kernels/shard.h"

namespace lossd::bench {

std::string ProblemOf(const std::vector<std::string>& devices) {
  for (const std::string& name : devices) {
    if (!IsDevice(name)) return "'" + name + "' is no device: name cpu, or cuda:0, cuda:1 and so on";
  }
  if (devices.size() < 2) return "name two devices or more; one is measured with --device=" + devices.front();
  if (devices.size() > static_cast<size_t>(kernels::kMostRanks)) {
    return "these are " + std::to_string(devices.size()) + " devices: name at most " +
           std::to_string(kernels::kMostRanks);
  }
  std::set<std::string> seen;
  for (const std::string& name : devices) {
    if ((name == "cpu") != (devices.front() == "cpu")) {
      return "'" + devices.front() + "' and '" + name +
             "' are of different kinds: name cpu alone, or CUDA devices";
    }
    if (!seen.insert(name).second && name != "cpu") {
      return name + " is there twice: name a CUDA device of its own for each rank";
    }
  }
  return "";
}

CLI::Option* AddDevicesOption(CLI::App& command, std::vector<std::string>& devices, const std::string& help) {
  return command
      .add_option_function<std::vector<std::string>>(
          "--devices",
          [&devices](const std::vector<std::string>& names) {
            if (const std::string problem = ProblemOf(names); !problem.empty()) {
              throw CLI::ValidationError("--devices", problem);
            }
            devices = names;
          },
          help)
      ->delimiter(',')
      ->type_name("cuda:0,cuda:1,...|cpu,cpu,...");
}

void AddDevicesOptions(CLI::App& command, DevicesOptions& options) {
  constexpr char kGroup[] = "Over devices";
  auto* const devices = AddDevicesOption(command, options.devices,
                                         "Spread the vocabulary over these devices, a process each, and time "
                                         "the step beside that of one of them, in turns")
                            ->excludes(command.get_option("--device"))
                            ->group(kGroup);
  command.add_option("--steps", options.steps, "Steps of a round, which follow each other")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->needs(devices)
      ->group(kGroup);
  command.add_flag("!--no_copies", options.copies, "Let no copy engine move rows and parts of dX: NCCL does")
      ->needs(devices)
      ->group(kGroup);
  command
      .add_flag("!--rows_are_there", options.rows_arrive,
                "Do not send rows to all ranks: they have them already")
      ->needs(devices)
      ->group(kGroup);
}

}  // namespace lossd::bench
