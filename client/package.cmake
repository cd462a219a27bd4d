# What `cmake --install` puts in place for programs that use the client library: `find_package(lossd)` and
# `target_link_libraries(... lossd::client)`. Only this much: `cmake --install BUILD --component lossd_client`.
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
  FILES ${CMAKE_CURRENT_LIST_DIR}/include/lossd/c_api.h ${CMAKE_CURRENT_LIST_DIR}/include/lossd/checkpoint.h
        ${CMAKE_CURRENT_LIST_DIR}/include/lossd/client.h ${CMAKE_CURRENT_LIST_DIR}/include/lossd/flush.h
        ${CMAKE_CURRENT_LIST_DIR}/include/lossd/logits.h ${CMAKE_CURRENT_LIST_DIR}/include/lossd/loss.h
        ${CMAKE_CURRENT_LIST_DIR}/include/lossd/optimizer.h ${CMAKE_CURRENT_LIST_DIR}/include/lossd/region.h
        ${CMAKE_CURRENT_LIST_DIR}/include/lossd/weights.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lossd
  COMPONENT lossd_client)
install(
  EXPORT lossdTargets
  NAMESPACE lossd::
  DESTINATION ${package_dir}
  COMPONENT lossd_client)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lossdConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/lossdConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lossdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/lossdConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/lossdConfigVersion.cmake
  DESTINATION ${package_dir}
  COMPONENT lossd_client)
