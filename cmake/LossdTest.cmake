# lossd_test(NAME <name> SOURCES <file>... [LIBRARIES <target>...] [LABELS <label>...] [TIMEOUT <seconds>] [COST <number>])
# One GoogleTest binary, registered with CTest under <name>. LABELS: unit, conformance, integration; add "tsan" where the
# test should also run under ThreadSanitizer. TIMEOUT is a guard against hangs, never an assertion. COST: what takes long
# is begun first, so that nothing is left to run alone in the end.
function(lossd_test)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT;COST" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} lossd_warnings GTest::gmock GTest::gtest_main)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  if(LOSSD_SANITIZER)  # a third less to compile; warnings are judged by the release build, which sees more of the code's flow
    set_property(SOURCE ${arg_SOURCES} APPEND PROPERTY COMPILE_OPTIONS -Og -Wno-error)  # these come behind -Werror
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME})
  # OpenMP's threads spin for each other while they wait: beside another test that takes many times the time of the work.
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} ENVIRONMENT OMP_WAIT_POLICY=passive)
  if(arg_COST)
    set_tests_properties(${arg_NAME} PROPERTIES COST ${arg_COST})
  endif()
endfunction()

# lossd_script_test(NAME <name> COMMAND <program> [<argument>...] [LABELS <label>...] [TIMEOUT <seconds>] [COST <number>])
# A test that is a script. LOSSD_PYTHON is the distribution's interpreter, which has gRPC and NumPy; another one in PATH may
# not. Where there is none (a machine set up only to build and run) such tests are left out.
find_program(LOSSD_PYTHON python3 PATHS /usr/bin NO_DEFAULT_PATH)
if(NOT LOSSD_PYTHON)
  message(STATUS "No /usr/bin/python3: tests written as scripts are left out (tools/setup.sh test installs it)")
endif()
function(lossd_script_test)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT;COST" "COMMAND;LABELS" ${ARGN})
  if(NOT LOSSD_PYTHON)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${arg_COMMAND})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  if(arg_COST)
    set_tests_properties(${arg_NAME} PROPERTIES COST ${arg_COST})
  endif()
endfunction()
