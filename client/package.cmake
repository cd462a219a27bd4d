# What `cmake --install` puts in place for programs that use the client library: `find_package(lossd)` and
# `target_link_libraries(... lossd::client)`, or of a C program `find_package(lossd COMPONENTS c)` and lossd::c, or
# `pkg-config lossd_c`. Only this much: `cmake --install BUILD --component lossd_client`.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lossd)
set_target_properties(lossd_client PROPERTIES EXPORT_NAME client)
set_target_properties(lossd_proto PROPERTIES EXPORT_NAME proto)
set_target_properties(lossd_wire PROPERTIES EXPORT_NAME wire)
set_target_properties(lossd_safetensors PROPERTIES EXPORT_NAME safetensors)

install(
  TARGETS lossd_client lossd_proto lossd_wire lossd_safetensors
  EXPORT lossdTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT lossd_client)
install(
  DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/include/lossd/
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lossd
  COMPONENT lossd_client
  FILES_MATCHING PATTERN "*.h")
install(
  EXPORT lossdTargets
  NAMESPACE lossd::
  DESTINATION ${package_dir}
  COMPONENT lossd_client)

# In a file of its own: programs in C need nothing of what lossd::client is made of.
set_target_properties(lossd_c PROPERTIES EXPORT_NAME c)
install(
  TARGETS lossd_c
  EXPORT lossdCTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT lossd_client)
install(
  EXPORT lossdCTargets
  NAMESPACE lossd::
  DESTINATION ${package_dir}
  COMPONENT lossd_client)
file(RELATIVE_PATH LOSSD_PREFIX_FROM_PKGCONFIG /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/lossd_c.pc.in ${CMAKE_CURRENT_BINARY_DIR}/lossd_c.pc @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/lossd_c.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT lossd_client)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lossdConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/lossdConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lossdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/lossdConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/lossdConfigVersion.cmake
  DESTINATION ${package_dir}
  COMPONENT lossd_client)
