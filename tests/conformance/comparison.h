// How close a device's results are to fp64, beside plain arithmetic in the same type: the criteria of
// docs/numerics.md.
#ifndef LOSSD_TESTS_CONFORMANCE_COMPARISON_H_
#define LOSSD_TESTS_CONFORMANCE_COMPARISON_H_

#include <string>
#include <vector>

#include "server/engine/device/head_backend.h"
#include "tests/unit/kernels/problem.h"

namespace lossd::engine::testing {

// Seeds of a case: LOSSD_SEEDS of the environment, which is 32 for the tables of docs/numerics.md; otherwise
// few.
int ClosenessSeeds();

// Largest difference in units in the last place of the expected value; infinite if one is not finite.
double WorstUlp(const std::vector<float>& actual, const std::vector<double>& expected);

// The worst over several problems.
class Comparison {
 public:
  // Runs the problem, none of whose rows is ignored, on a new head.
  void Add(Device* device, const kernels::testing::Problem& problem);
  // Results of the problem that came about in another way.
  void Add(const kernels::testing::Problem& problem, const std::vector<float>& losses,
           const std::vector<float>& dx, const std::vector<float>& dw, const std::vector<float>& db = {});

  // "loss A of B (C ulp), dx A of B, dw A of B", and db with a bias: fused, unfused.
  std::string ToText() const;
  void ExpectCloseEnough(kernels::DataType type) const;

 private:
  struct Errors {
    double loss = 0;
    double dx = 0;
    double dw = 0;
    double db = 0;

    void Worsen(const Errors& other);
  };

  Errors fused_;
  Errors unfused_;
  double loss_ulp_ = 0;
};

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_CONFORMANCE_COMPARISON_H_
