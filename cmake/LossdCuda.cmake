# Decides whether CUDA code is built. Sets LOSSD_CUDA to ON or OFF for every folder; with ON the language is enabled and
# lossd::cudart is the static CUDA run time. libcublasLt and the driver are opened at run time, so they are not linked.
set(LOSSD_CUDA AUTO CACHE STRING
  "CUDA code: AUTO builds it if a toolkit is found, DRIVER if an NVIDIA driver is there as well, ON insists, OFF: none")
set_property(CACHE LOSSD_CUDA PROPERTY STRINGS AUTO DRIVER ON OFF)

# What device code is made for: Ampere, with PTX for whatever is newer, and Hopper with its own instructions, whose PTX
# nothing else could use.
set(lossd_cuda_architectures 80 90a-real)
# Where tools/cuda_toolkit.sh puts a toolkit of wheels.
set(lossd_cuda_wheels ${PROJECT_SOURCE_DIR}/build/cuda-toolkit)

# Sets `result` to nvcc's version if it compiles and links what lossd needs, with this project's host compiler; else to
# "". An nvcc is tried once, unless it changes.
function(lossd_try_nvcc nvcc result)
  file(TIMESTAMP ${nvcc} changed)
  set(key "${nvcc} ${changed} ${CMAKE_CXX_COMPILER}")
  if(NOT "$CACHE{LOSSD_CUDA_TRIED}" STREQUAL key)
    set(scratch ${CMAKE_BINARY_DIR}/CMakeFiles/lossd_cuda)
    file(WRITE ${scratch}/probe.cu
      "#include <cublasLt.h>\n#include <cuda.h>\n#include <cuda_bf16.h>\n#include <cuda_runtime.h>\n"
      "#include <span>\n"
      "__global__ void Probe(__nv_bfloat16* out) { out[threadIdx.x] = __float2bfloat16(1.0f); }\n"
      "int main() { Probe<<<1, 32>>>(nullptr); return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1; }\n")
    execute_process(
      COMMAND ${nvcc} -std=c++20 -arch=sm_90a -cudart static -ccbin ${CMAKE_CXX_COMPILER} probe.cu -o probe
      WORKING_DIRECTORY ${scratch} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    file(WRITE ${scratch}/probe.log "${nvcc}\n${output}\nresult: ${status}\n")
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version ERROR_QUIET)
    if(status EQUAL 0 AND version MATCHES "V([0-9.]+)")
      set(version ${CMAKE_MATCH_1})
    else()
      set(version "")
    endif()
    set(LOSSD_CUDA_TRIED ${key} CACHE INTERNAL "")
    set(LOSSD_CUDA_VERSION "${version}" CACHE INTERNAL "")
  endif()
  set(${result} "$CACHE{LOSSD_CUDA_VERSION}" PARENT_SCOPE)
endfunction()

# Sets `nvcc_out` to the first nvcc that works, or to "" with `why_out` telling what is wrong.
function(lossd_find_nvcc nvcc_out why_out)
  find_program(on_path nvcc NO_CACHE NO_DEFAULT_PATH PATHS ENV PATH)
  set(candidates "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" "${on_path}")
  if(DEFINED ENV{CUDA_HOME})
    list(APPEND candidates $ENV{CUDA_HOME}/bin/nvcc)
  endif()
  list(APPEND candidates /usr/local/cuda/bin/nvcc ${lossd_cuda_wheels}/bin/nvcc)
  list(REMOVE_DUPLICATES candidates)
  set(why "no CUDA toolkit")
  foreach(nvcc IN LISTS candidates)
    if(NOT EXISTS "${nvcc}")
      continue()
    endif()
    lossd_try_nvcc(${nvcc} version)
    if(version)
      set(${nvcc_out} ${nvcc} PARENT_SCOPE)
      return()
    endif()
    set(why "${nvcc} does not compile what lossd needs (see ${CMAKE_BINARY_DIR}/CMakeFiles/lossd_cuda/probe.log)")
  endforeach()
  set(${nvcc_out} "" PARENT_SCOPE)
  set(${why_out} ${why} PARENT_SCOPE)
endfunction()

set(lossd_cuda_wanted "$CACHE{LOSSD_CUDA}")
set(LOSSD_CUDA OFF)
set(lossd_driver_missing FALSE)
if(lossd_cuda_wanted STREQUAL "DRIVER")
  set(lossd_cuda_wanted AUTO)
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/tools/cuda_toolkit.sh --driver RESULT_VARIABLE lossd_driver_missing)
endif()
if(lossd_driver_missing)
  set(lossd_cuda_status "no NVIDIA driver on this machine: CPU only (LOSSD_CUDA=ON builds CUDA code all the same)")
elseif(lossd_cuda_wanted STREQUAL "AUTO" AND LOSSD_SANITIZER)
  set(lossd_cuda_status "left out of instrumented builds")
elseif(lossd_cuda_wanted STREQUAL "AUTO" OR lossd_cuda_wanted)
  if(LOSSD_SANITIZER)
    message(FATAL_ERROR "LOSSD_CUDA=ON and LOSSD_SANITIZER exclude each other")
  endif()
  if(CMAKE_CUDA_COMPILER AND NOT EXISTS "${CMAKE_CUDA_COMPILER}")
    # The toolkit of an earlier configuration is gone: CMake has to forget what it knew of it.
    unset(CMAKE_CUDA_COMPILER CACHE)
    file(REMOVE ${CMAKE_PLATFORM_INFO_DIR}/CMakeCUDACompiler.cmake)
  endif()
  lossd_find_nvcc(lossd_nvcc lossd_cuda_status)
  if(lossd_nvcc)
    set(LOSSD_CUDA ON)
  elseif(NOT lossd_cuda_wanted STREQUAL "AUTO")
    message(FATAL_ERROR "LOSSD_CUDA=ON, but ${lossd_cuda_status}. tools/cuda_toolkit.sh --always brings one.")
  else()
    string(APPEND lossd_cuda_status ": CPU only")
  endif()
else()
  set(lossd_cuda_status "switched off")
endif()

if(LOSSD_CUDA)
  set(CMAKE_CUDA_COMPILER ${lossd_nvcc} CACHE FILEPATH "CUDA compiler")
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER} CACHE FILEPATH "Compiler of the host's half of CUDA code")
  set(CMAKE_CUDA_ARCHITECTURES ${lossd_cuda_architectures})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${lossd_ccache})
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know how to ask nvcc for C++20.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # -lineinfo names source lines in profilers and in compute-sanitizer, at no cost at run time.
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo -Xcompiler=-g1 -DNDEBUG")

  # By hand rather than by FindCUDAToolkit, which insists on libraries that are not linked here and that wheels name
  # otherwise.
  find_package(Threads REQUIRED)
  find_library(LOSSD_CUDART cudart_static PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED NO_CACHE
    NO_DEFAULT_PATH)
  cmake_path(GET LOSSD_CUDART PARENT_PATH lossd_cuda_libraries)
  add_library(lossd::cudart INTERFACE IMPORTED)
  foreach(folder IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
    target_include_directories(lossd::cudart SYSTEM INTERFACE ${folder})
    if(EXISTS ${folder}/cccl)
      target_include_directories(lossd::cudart SYSTEM INTERFACE ${folder}/cccl)
    endif()
  endforeach()
  target_link_libraries(lossd::cudart INTERFACE ${LOSSD_CUDART} Threads::Threads rt ${CMAKE_DL_LIBS})
  # Programs built here find this toolkit's libcublasLt when they open it; LD_LIBRARY_PATH goes first.
  list(APPEND CMAKE_BUILD_RPATH ${lossd_cuda_libraries})

  # -Wpedantic is missing: the line directives that nvcc writes are no ISO C++.
  target_compile_options(lossd_warnings INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Wshadow,-Wnon-virtual-dtor,-Werror>")
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " lossd_cuda_status)
  set(lossd_cuda_status "toolkit ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), for ${lossd_cuda_status}")
endif()
message(STATUS "CUDA: ${lossd_cuda_status}")
# For ./check.sh, which says what it compiles.
set(LOSSD_CUDA_STATUS "${lossd_cuda_status}" CACHE INTERNAL "")
