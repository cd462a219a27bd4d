"""Messages of grpc.health.v1 and grpc.reflection.v1alpha, as far as the tests need them, without their generated code.

The field numbers are those of the published protocols.
"""
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING, _ENUM_AS_INT, _MESSAGE = 9, 5, 11
_OPTIONAL, _REPEATED = 1, 3


def _messages(package, definitions):
    """{name: class} of {message: [(field, number, type, label, type name)]}."""
    file = descriptor_pb2.FileDescriptorProto(name=package.replace(".", "/") + ".proto", package=package, syntax="proto3")
    for name, fields in definitions.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label, type_name in fields:
            message.field.add(name=field, number=number, type=kind, label=label,
                              type_name=type_name and f".{package}.{type_name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    factory = message_factory.MessageFactory(pool)
    return {name: factory.GetPrototype(pool.FindMessageTypeByName(f"{package}.{name}")) for name in definitions}


_HEALTH = _messages("grpc.health.v1", {
    "HealthCheckRequest": [("service", 1, _STRING, _OPTIONAL, None)],
    "HealthCheckResponse": [("status", 1, _ENUM_AS_INT, _OPTIONAL, None)],  # an enum has the same encoding as int32
})
_REFLECTION = _messages("grpc.reflection.v1alpha", {
    "ServerReflectionRequest": [("list_services", 7, _STRING, _OPTIONAL, None)],
    "ServiceResponse": [("name", 1, _STRING, _OPTIONAL, None)],
    "ListServiceResponse": [("service", 1, _MESSAGE, _REPEATED, "ServiceResponse")],
    "ServerReflectionResponse": [("list_services_response", 6, _MESSAGE, _OPTIONAL, "ListServiceResponse")],
})
SERVING, NOT_SERVING = 1, 2


def health(channel, service=""):
    """The status code that the health service gives for `service`."""
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=_HEALTH["HealthCheckRequest"].SerializeToString,
        response_deserializer=_HEALTH["HealthCheckResponse"].FromString)
    return call(_HEALTH["HealthCheckRequest"](service=service)).status


def watch_health(channel):
    """The answers of the health service to whoever watches the server as a whole."""
    call = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=_HEALTH["HealthCheckRequest"].SerializeToString,
        response_deserializer=_HEALTH["HealthCheckResponse"].FromString)
    return call(_HEALTH["HealthCheckRequest"]())


def services(channel):
    """Names of the services that reflection lists."""
    call = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=_REFLECTION["ServerReflectionRequest"].SerializeToString,
        response_deserializer=_REFLECTION["ServerReflectionResponse"].FromString)
    responses = list(call(iter([_REFLECTION["ServerReflectionRequest"](list_services="*")])))
    return {service.name for service in responses[0].list_services_response.service}
