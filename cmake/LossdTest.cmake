# lossd_test(NAME <program> SOURCES <file>... [TESTS <test>...] [LIBRARIES <target>...] [LABELS <label>...]
#            [TSAN <test>...] [TIMEOUT <seconds>] [COST <number>] [OPTIMIZED] [HERMETIC])
# One GoogleTest program, as a rule of all test files of a folder and those below it: every program that is linked takes
# seconds, and files that are compiled together read their headers once. CTest knows each NAME_test.cc by itself, by its
# path without tests/ (unit/engine/head/step_test), and runs it in a process of its own (tests/test_main.cc); a program
# without such a file is run whole, by the program's name. So that files can be compiled together, each has a namespace
# of its own: lossd::engine::step_test.
#   TESTS      test files, without .cc, that come out of LIBRARIES
#   LABELS     unit, conformance, integration, bench, deploy, gpu, attack, hosts, model or nightly; and core, for what
#              `./check.sh quick` runs, and `asan` of what is in its tree: unit tests have it by themselves
#   TSAN       the test files, without .cc, that also run under ThreadSanitizer
#   TIMEOUT    a guard against hangs, never an assertion
#   COST       what takes long is begun first, so that nothing is left to run alone in the end
#   OPTIMIZED  the test files calculate so much that they have to be optimised; elsewhere that takes longer than it
#              saves
#   HERMETIC   the result depends on nothing but the program: ./check.sh need not run again what has passed and not
#              changed
set(lossd_tests_dir ${PROJECT_SOURCE_DIR}/tests)
# For PYTHONPATH: messages and calls as Python has them, and what scripts of several folders share.
set(lossd_test_modules ${PROJECT_BINARY_DIR}/tests/integration/python_client/stubs:${lossd_tests_dir}/support)
set(lossd_test_results ${PROJECT_BINARY_DIR}/test-results)  # of every test by itself, for ./check.sh
add_custom_target(lossd_tsan_tests)
add_custom_target(lossd_core_tests)

add_library(lossd_test_main STATIC ${lossd_tests_dir}/test_main.cc ${lossd_tests_dir}/unchanged.cc)
target_link_libraries(lossd_test_main PUBLIC GTest::gmock GTest::gtest PRIVATE PkgConfig::XXHASH OpenSSL::Crypto
  lossd_warnings)

function(lossd_test)
  cmake_parse_arguments(arg "OPTIMIZED;HERMETIC" "NAME;TIMEOUT;COST" "SOURCES;TESTS;LIBRARIES;LABELS;TSAN" ${ARGN})
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} lossd_warnings lossd_test_main)
  if(NOT arg_OPTIMIZED)
    target_compile_options(${arg_NAME} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()

  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  if("unit" IN_LIST arg_LABELS)
    list(APPEND arg_LABELS core)
  endif()
  if("core" IN_LIST arg_LABELS)
    add_dependencies(lossd_core_tests ${arg_NAME})
  endif()

  set(tests ${arg_SOURCES})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(APPEND tests ${arg_TESTS})
  if(NOT tests)
    lossd_add_test(${arg_NAME} ${arg_NAME})
  endif()
  foreach(file IN LISTS tests)
    cmake_path(ABSOLUTE_PATH file NORMALIZE OUTPUT_VARIABLE path)
    cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    string(REGEX REPLACE "^tests/" "" path ${path})
    cmake_path(REMOVE_EXTENSION path)
    cmake_path(GET path FILENAME stem)
    lossd_add_test(${path} ${arg_NAME} --test_file=${stem})
    if(stem IN_LIST arg_TSAN)
      list(REMOVE_ITEM arg_TSAN ${stem})
      set_property(TEST ${path} APPEND PROPERTY LABELS tsan)
      add_dependencies(lossd_tsan_tests ${arg_NAME})
    endif()
  endforeach()
  if(arg_TSAN)
    message(FATAL_ERROR "${arg_NAME}: TSAN names no test file of it: ${arg_TSAN}")
  endif()
endfunction()

# Adds one entry of lossd_test() to CTest; reads its arguments.
macro(lossd_add_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  # OpenMP's threads spin for each other while they wait: beside another test that takes many times the time of the
  # work.
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}"
    TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "OMP_WAIT_POLICY=passive;GTEST_OUTPUT=xml:${lossd_test_results}/${name}.xml")
  if(arg_HERMETIC AND NOT LOSSD_SANITIZER)  # whose reports come when the program ends, and depend on settings
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT LOSSD_HERMETIC=1)
  endif()
  if(arg_COST)
    set_tests_properties(${name} PROPERTIES COST ${arg_COST})
  endif()
endmacro()

# lossd_script_test(NAME <name> COMMAND <program> [<argument>...] [LABELS <label>...] [TIMEOUT <seconds>]
#                   [COST <number>] [PROCESSORS <number that it keeps busy>])
# A test that is a script. LOSSD_PYTHON is the distribution's interpreter, which has gRPC and NumPy; another one in PATH
# may not. Where there is none (a machine set up only to build and run) such tests are left out.
find_program(LOSSD_PYTHON python3 PATHS /usr/bin NO_DEFAULT_PATH)
if(NOT LOSSD_PYTHON)
  message(STATUS "No /usr/bin/python3: tests written as scripts are left out (tools/setup.sh test installs it)")
endif()
function(lossd_script_test)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT;COST;PROCESSORS" "COMMAND;LABELS" ${ARGN})
  if(NOT LOSSD_PYTHON)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${arg_COMMAND})
  # What unittest skipped, it counts as passed, and so it does where there was nothing to run.
  set_tests_properties(${arg_NAME} PROPERTIES
    LABELS "${arg_LABELS}"
    TIMEOUT ${arg_TIMEOUT}
    SKIP_REGULAR_EXPRESSION "OK \\(skipped=;Ran 0 tests")
  if(arg_PROCESSORS)
    set_tests_properties(${arg_NAME} PROPERTIES PROCESSORS ${arg_PROCESSORS})
  endif()
  if(arg_COST)
    set_tests_properties(${arg_NAME} PROPERTIES COST ${arg_COST})
  endif()
endfunction()
