# Language level, warnings, sanitizers and the compiler cache, for every target of the project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(THREADS_PREFER_PTHREAD_FLAG ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
# -g1 keeps line numbers for back traces and sanitizers; full debug information triples the time to build.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
if(LOSSD_SANITIZER)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1 -DNDEBUG")  # instrumented code compiles in half the time so
endif()

# The compiler cache works across clones and build trees, the one of pip too: paths below the root do not count, nor
# does the locale, which Python sets for what it starts where there is none (PEP 538). It is told so here, and not by
# scripts: pip and ninja are run by hand as well.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(lossd_ccache ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=true
    CCACHE_SLOPPINESS=locale ${CCACHE_PROGRAM})
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${lossd_ccache})
  endif()
endif()

# GCC's parser collects its garbage at 1 GiB, not at 128 MiB: a tenth of a compiler's time for a fifth more memory.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=1048576>")
endif()

# Applied to our own code; generated code is compiled without it. LossdCuda.cmake adds what nvcc understands.
add_library(lossd_warnings INTERFACE)
target_compile_options(lossd_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Werror>")

if(LOSSD_SANITIZER STREQUAL "address")
  # Without the checks that find what AddressSanitizer finds as well, or never found anything here: with them the
  # headers of gRPC and Abseil take a quarter longer to compile.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=null,vptr,object-size -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(LOSSD_SANITIZER STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(NOT LOSSD_SANITIZER STREQUAL "")
  message(FATAL_ERROR "LOSSD_SANITIZER is '${LOSSD_SANITIZER}'; it must be empty, 'address' or 'thread'")
endif()

# Sources of a target are compiled several at a time, so that they read their headers once: two thirds less to do. What
# a file calls its own in a namespace without a name must therefore differ from what its neighbours do. clang-tidy sees
# by itself what has changed lately (the preset tidy), and -DCMAKE_UNITY_BUILD=OFF everything, with which a single edit
# is compiled sooner.
if(NOT DEFINED CMAKE_UNITY_BUILD)
  set(CMAKE_UNITY_BUILD ON)
endif()
set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)  # docs/decisions/0013

# Programs find the project's own libraries beside their folder, in the build tree, in a wheel and where they are
# installed.
list(APPEND CMAKE_BUILD_RPATH "$ORIGIN/../lib")
list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")

include_directories(${CMAKE_CURRENT_SOURCE_DIR})
